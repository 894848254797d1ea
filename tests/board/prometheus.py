"""Prometheus for the duration of a command or a block: ``prometheus.py FOLDER COMMAND...``.

The program is the one on the PATH. Otherwise Debian's package is fetched into FOLDER and unpacked, not installed. The
command gets the program's path from TIERKV_TEST_PROMETHEUS.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

PROGRAM = "TIERKV_TEST_PROMETHEUS"
SCRAPE = "250ms"
START_TIMEOUT_S = 60.0


def fetch(folder: Path) -> Path:
    """Unpack Debian's package, unless that is done. Returns the path of the program.

    Raises:
        RuntimeError: the system is not Debian, or its archive cannot be reached.
    """
    program = folder / "root/usr/bin/prometheus"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "download", "prometheus"], folder)
        (package,) = folder.glob("prometheus_*.deb")
        _run(["dpkg", "-x", str(package), "root"], folder)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no {error.filename} here: install prometheus") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{error.cmd}: {error.stderr.strip()}; install prometheus") from None
    return program


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=300, capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str | float) -> Any:
        """Return the data of an answer.

        Raises:
            AssertionError: the server refuses the question, such as a query with a fault; with its reason.
        """
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(parameters)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            urlopen(f"{self.url}/-/ready", timeout=1).close()
        except (URLError, OSError):
            return False
        return True


@contextmanager
def serving(program: Path, folder: Path, rules: str, targets: Sequence[str]) -> Iterator[Server]:
    """Run a server over some targets on the loopback interface.

    Raises:
        RuntimeError: it did not start; with its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    (folder / "rules.yml").write_text(rules, encoding="utf-8")
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "tierkv", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
        "query.lookback-delta": "2s",
        "log.level": "warn",
    }
    command = [str(program), *(f"--{name}={value}" for name, value in options.items())]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    server = Server(f"http://{address}")
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"prometheus did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Find the program, and run the command."""
    folder, *command = arguments
    found = shutil.which("prometheus")
    program = Path(found) if found else fetch(Path(folder).resolve())
    return subprocess.run(command, env={**environment, PROGRAM: str(program)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
