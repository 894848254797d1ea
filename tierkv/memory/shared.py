"""Memory that worker processes share with the process that opened the stack.

It has no name: a memfd, which other processes open through ``/proc/PID/fd``. So there is nothing to unlink and nothing
to sweep: the kernel frees it when the last process that maps it is gone, however it went. Nor does the size of /dev/shm
matter, which is 64 MiB in many containers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.memory.arena import HostArena


@dataclass(frozen=True, slots=True)
class ArenaHandle:
    """How another process of the same user, on the same host, finds an arena. Plain data that pickles.

    pid, fd: where the memory is held open. device, inode: which memory it is, since pids and descriptors are reused.
    """

    pid: int
    fd: int
    device: int
    inode: int
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """The same for memory of any use, with its length in bytes."""

    pid: int
    fd: int
    device: int
    inode: int
    length: int


class SharedMemory:
    """Memory, of one arena or of something else, as its owner holds it.

    name: what the system shows it as. ``map`` is given to :class:`HostArena`; then :meth:`handle` is for other
    processes. The length is sealed: nobody can
    cut memory off under another process, which would end it with SIGBUS.
    """

    def __init__(self, name: str = "tierkv-arena") -> None:
        self._name = name
        self._fd = -1
        self._length = 0

    def map(self, length: int) -> mmap.mmap:
        """Take and map that many bytes. Once.

        Raises:
            OSError: the system has not so much memory. The kernel would promise it all the same, and kill later.
        """
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if length > physical:
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: this machine has {physical} bytes")
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, length)
        self._length = length
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return mmap.mmap(self._fd, length)

    def handle(self, arena: HostArena) -> ArenaHandle:
        """How other processes find it.

        Raises:
            EngineProtocolError: it is closed, or was never mapped.
        """
        memory = self.memory_handle()
        return ArenaHandle(memory.pid, memory.fd, memory.device, memory.inode, arena.num_slots, arena.slot_bytes)

    def memory_handle(self) -> MemoryHandle:
        """The same for memory that is no arena.

        Raises:
            EngineProtocolError: it is closed, or was never mapped.
        """
        if self._fd < 0:
            raise EngineProtocolError("the stack is closed: its arena cannot be shared any more")
        stat = os.fstat(self._fd)
        return MemoryHandle(os.getpid(), self._fd, stat.st_dev, stat.st_ino, self._length)

    def close(self) -> None:
        """Let nobody attach any more. Who has it mapped keeps it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def find_memory(name: str) -> list[bytes]:
    """What stands in memory of that name, in this process and in others that this one may look into.

    For what is needed before anybody could be told of a handle: a name that only one engine uses leads to it.
    """
    found: dict[tuple[int, int], bytes] = {}
    for link in _descriptors():
        with contextlib.suppress(OSError):  # it has been closed
            if str(link.readlink()).startswith(f"/memfd:{name} "):
                with link.open("rb") as memory:
                    stat = os.fstat(memory.fileno())
                    found[stat.st_dev, stat.st_ino] = memory.read()
    return list(found.values())


def _descriptors() -> Iterator[Path]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                yield from (process / "fd").iterdir()


def attach(handle: ArenaHandle) -> HostArena:
    """The arena that another process holds, mapped into this one.

    Raises:
        EngineProtocolError: that process has ended or closed its stack, or this one may not reach it.
    """
    return HostArena(
        handle.num_slots * handle.slot_bytes, handle.slot_bytes - HEADER_BYTES, lambda length: _map(handle, length)
    )


def attach_memory(handle: MemoryHandle) -> mmap.mmap:
    """Memory that another process holds, mapped into this one.

    Raises:
        EngineProtocolError: that process has ended or closed its stack, or this one may not reach it.
    """
    return _map(handle, handle.length)


def _map(handle: ArenaHandle | MemoryHandle, length: int) -> mmap.mmap:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineProtocolError(
                f"the arena of process {handle.pid} cannot be opened ({error}): that process has ended or closed its "
                "stack, or belongs to another user or container"
            ) from error
        undo.callback(os.close, fd)  # the mapping holds a descriptor of its own
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino, stat.st_size) != (handle.device, handle.inode, length):
            raise EngineProtocolError(
                f"{path} is not the arena any more: process {handle.pid} has closed its stack, or is another one now"
            )
        return mmap.mmap(fd, length)
