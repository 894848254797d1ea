"""Control of the library that fails, tears and records system calls of this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_LIBRARY = "TIERKV_HARNESS_LIBRARY"
"""Name of the environment variable that says which library was preloaded, or why none was."""


class Call(IntFlag):
    """System calls that a plan can name; the C file has the same table."""

    OPEN = 1
    WRITE = 2
    SYNC = 4
    RENAME = 8
    LINK = 16
    UNLINK = 32
    TRUNCATE = 64
    ALLOCATE = 128
    MKDIR = 256


ALL_CALLS = Call(511)
NO_CALLS = Call(0)


class Action(IntEnum):
    """Fate of the chosen call; the C file has the same table."""

    FAIL = 1
    SHORTEN = 2
    """A write stores a part, and says so."""
    KILL_BEFORE = 3
    KILL_AFTER = 4
    TEAR = 5
    """A write stores a part, and the process ends; another call does not happen, and the process ends."""


class SystemCalls:
    """Plans and journal of the calls of this process that change files below one directory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.calls_count.restype = ctypes.c_long
        library.calls_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint]
        library.calls_refuse.argtypes = [ctypes.c_uint, ctypes.c_int]
        library.calls_note.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def watch(self, directory: Path, journal_fd: int = -1) -> None:
        """Begin to count calls below a directory, and to write them to a journal if there is one."""
        self._library.calls_watch(os.fsencode(directory), journal_fd)

    def arm(self, number: int, action: Action, error: int = 0, calls: Call = ALL_CALLS) -> None:
        """Choose the ``number``-th call from now on, of those named.

        Args:
            number: 1 for the next one.
            action: what happens to it.
            error: errno of a call that fails.
            calls: which calls count.
        """
        self._library.calls_arm(number, action, error, calls)

    def count(self, calls: Call = ALL_CALLS) -> int:
        """Number of these calls since :meth:`watch`."""
        return int(self._library.calls_count(calls))

    def refuse(self, calls: Call, error: int = 0) -> None:
        """Let all of these calls fail from now on; none: end that."""
        self._library.calls_refuse(calls, error)

    @property
    def has_fired(self) -> bool:
        """Whether the chosen call has happened."""
        return bool(self._library.calls_fired())

    def note(self, data: bytes) -> None:
        """Put a remark between the calls of the journal."""
        self._library.calls_note(data, len(data))

    def let_syncs_lie(self) -> None:
        """From now on, syncs succeed and force nothing, as far as the journal says."""
        self._library.calls_lie(1)


def load() -> SystemCalls | str:
    """Library of this process, or the reason why there is none. The program is started again to have it preloaded."""
    if _LIBRARY not in os.environ:
        named = _compile(Path(tempfile.mkdtemp(prefix="tierkv-harness-")))
        environment = os.environ | {_LIBRARY: str(named)}
        if isinstance(named, Path):
            environment["LD_PRELOAD"] = str(named)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    named = os.environ[_LIBRARY]
    if not Path(named).is_file():
        return named
    library = ctypes.CDLL(named)
    shutil.rmtree(Path(named).parent)  # it stays mapped
    del os.environ["LD_PRELOAD"]
    return SystemCalls(library)


def _compile(folder: Path) -> Path | str:
    """Path of the compiled library, or the reason why there is none."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not sys.platform.startswith("linux") or compiler is None:
        return "no C compiler on Linux: install gcc or clang, or name one in CC"
    library = folder / "system_calls.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return library if done.returncode == 0 else f"{compiler} failed: {done.stderr.strip()[-500:]}"
