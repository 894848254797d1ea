"""Forked processes that report by messages: what they sent before a kill arrives whole."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
from collections.abc import Callable, Iterator
from typing import Any, Self

HANG_S = 60
"""Seconds after which a process is ended: it hangs."""
_LENGTH = struct.Struct("<I")
Message = tuple[str, Any]
"""Kind and content."""

SILENCE: Message = ("raised", "no message for a minute")
"""Last message of processes that hang."""


def pack(message: Message) -> bytes:
    """Encode a message with its length."""
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Crew:
    """Processes that share a pipe. A message of up to 4 KiB is sent whole or not at all, on any thread.

    Use it as a context manager: at the end no process is left.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._pids: list[int] = []
        self._buffer = bytearray()
        self.ends: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._close_writing()
        os.close(self._reading)

    def start(self, run: Callable[[Callable[[Message], None]], object]) -> None:
        """Fork a process that calls ``run`` with a function that sends messages; its result is the last message."""
        pid = os.fork()
        if pid:
            self._pids.append(pid)
            return
        try:
            signal.alarm(HANG_S)
            self._send(("result", run(self._send)))
        except BaseException as error:  # noqa: BLE001  whatever ends the process is a finding
            self._send(("raised", f"{type(error).__name__}: {error}"[:2000]))
        os._exit(0)

    def messages(self, patience_s: float = HANG_S) -> Iterator[Message]:
        """Messages of all processes, until the last one has ended, or until :data:`SILENCE` for ``patience_s``."""
        self._close_writing()
        while True:
            while (message := self._take()) is not None:
                yield message
            if not select.select([self._reading], [], [], patience_s)[0]:
                yield SILENCE
                return
            data = os.read(self._reading, 1 << 16)
            if not data:
                return
            self._buffer += data

    def kill(self) -> None:
        """Kill all processes, and wait for them."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait for the processes; ``ends`` has the signals that ended some."""
        for pid in self._pids:
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                self.ends.append(signal.Signals(os.WTERMSIG(status)).name)
        self._pids.clear()

    def _send(self, message: Message) -> None:
        data = pack(message)
        while data:
            data = data[os.write(self._writing, data) :]

    def _take(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        message: Message = pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message

    def _close_writing(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1


def run_alone(run: Callable[[Callable[[Message], None]], object]) -> tuple[list[Message], list[str]]:
    """Messages and ends of one process, after its end."""
    with Crew() as crew:
        crew.start(run)
        found = list(crew.messages())
        if found and found[-1] == SILENCE:
            crew.kill()
        crew.wait()
    return found, crew.ends
