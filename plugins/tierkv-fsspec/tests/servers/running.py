"""Servers for the duration of a command: started on the loopback interface, awaited, and stopped in any case."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether a server accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, ready: Callable[[], bool], environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server, and wait until it is ready.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the end of its log.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command that the servers are for. Returns its exit code."""
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
