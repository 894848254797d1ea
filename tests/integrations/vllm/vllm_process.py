"""Engines in processes of their own: a crash or a hang of vLLM is a failed test with the end of its log."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0
LOG_LINES = 60
"""Lines of a log that a failure shows."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # vLLM's hashes of blocks begin with it: without it no restart finds anything
    "TIERKV_VALIDATE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}

Tokens = list[list[int]]
PlainTokens = Callable[[str, Tokens, int], Tokens]
"""(model, prompts, tokens of each answer) -> what vLLM answers without tierkv."""

StartEngine = Callable[..., "EngineProcess"]
"""(setup, environment=None) -> the engine. Use it in a ``with`` statement, which ends it."""


def all_processes() -> list[int]:
    """Every process that can be seen."""
    return [int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit()]


def processes_of(session: int) -> list[int]:
    """All processes of a session that still run."""
    found = []
    for pid in all_processes():
        try:
            state, _, _, of = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(pid)
    return found


class EngineError(AssertionError):
    """The engine's process ended, hung or raised; says which, and what it wrote last."""


class LoggedProcess:
    """A process in a session of its own, whose output goes to a file.

    Args:
        command: what to run.
        log: the file.
        environment: on top of this process's and :data:`ENVIRONMENT`.
        pass_fds: descriptors for it.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                pass_fds=pass_fds,
                start_new_session=True,
                text=True,
                bufsize=1,
            )

    @property
    def pid(self) -> int:
        """Process, and session of all processes that it has started."""
        return self.process.pid

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def failure(self, what: str) -> EngineError:
        """An error that shows the end of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return EngineError("\n".join([what, f"-- the end of {self.log}:", *lines[-LOG_LINES:]]))

    def show_stacks(self) -> None:
        """Have every thread of the process written to the log."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)

    def kill(self) -> None:
        """End it and everything it has started, at once. Idempotent."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while left := processes_of(self.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline_s, f"processes {left} cannot be killed"
            time.sleep(0.05)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class EngineProcess(LoggedProcess):
    """An engine that tests talk to.

    Args:
        arguments: of vLLM's EngineArgs.
        log: a file for what vLLM writes.
        environment: see :class:`LoggedProcess`.

    Raises:
        EngineError: the engine did not start.
    """

    def __init__(self, arguments: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._answers, theirs = os.pipe()
        self._unread = b""
        child = Path(__file__).with_name("vllm_child.py")
        try:
            super().__init__([sys.executable, str(child), str(theirs)], log, environment, (theirs,))
        finally:
            os.close(theirs)
        try:
            self._ask("the start of the engine", arguments, START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def call(self, function: str, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Run a scenario there: ``module:name`` is called with the ServedEngine and the arguments.

        Raises:
            EngineError: it raised, or there was no answer in time.
        """
        return self._ask(function, {"function": function, "arguments": arguments}, timeout_s)

    def close(self) -> None:
        """Shut the engine down in order, and wait for its end.

        Raises:
            EngineError: it did not end well, or left processes behind.
        """
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.show_stacks()
            self.kill()
            raise self.failure(f"the engine did not end within {END_TIMEOUT_S:g} s") from None
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while (left := processes_of(self.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self.kill()
        if code or left:
            raise self.failure(f"the engine ended with {code}, and left processes {left}")

    def kill(self) -> None:
        """End it at once, and everything it has started. Idempotent."""
        super().kill()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def __enter__(self) -> Self:
        """The engine."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut it down, or end it where a test failed."""
        if kind is None and self.is_alive():
            self.close()
        else:
            self.kill()

    def _ask(self, what: str, message: Mapping[str, Any], timeout_s: float) -> Any:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the missing answer says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        answer = json.loads(self._line(what, time.monotonic() + timeout_s))
        if "error" in answer:
            raise self.failure(f"{what} failed:\n{answer['error']}")
        return answer["result"]

    def _line(self, what: str, deadline_s: float) -> bytes:
        while b"\n" not in self._unread:
            if time.monotonic() > deadline_s:
                self.show_stacks()
                self.kill()
                raise self.failure(f"{what}: no answer in time")
            alive = self.is_alive()
            if select.select([self._answers], [], [], 0.2)[0]:
                came = os.read(self._answers, 1 << 20)
                self._unread += came
                alive = bool(came)  # nothing: the other end is closed
            if not alive and b"\n" not in self._unread:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_TIMEOUT_S)
                self.kill()
                raise self.failure(f"{what}: the process of the engine ended with {self.process.returncode}")
        line, _, self._unread = self._unread.partition(b"\n")
        return line
