"""Memory that worker processes share with the process that opened the stack.

It is a memfd, which other processes open through ``/proc/PID/fd``. It has no path, so nothing has to be unlinked: the
kernel frees it when the last process that maps it has ended, also after a crash. The size of /dev/shm, 64 MiB in many
containers, does not limit it.
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
    """Handle of an arena for another process of the same user on the same host. Plain data that pickles."""

    pid: int
    """Process that holds the memory open."""
    fd: int
    """Descriptor of the memory in that process."""
    device: int
    """Device of the memory. With ``inode`` it identifies the memory, because pids and descriptors are reused."""
    inode: int
    """Inode of the memory."""
    num_slots: int
    """Slots of the arena."""
    slot_bytes: int
    """Length of a slot."""


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """Handle of shared memory of any use. Plain data that pickles; fields as in :class:`ArenaHandle`."""

    pid: int
    fd: int
    device: int
    inode: int
    length: int
    """Length of the memory in bytes."""


class SharedMemory:
    """Owner of one shared memory. Its length is sealed: truncation would end other processes with SIGBUS.

    For an arena, pass :meth:`map` to :class:`HostArena`, and send :meth:`arena_handle` to other processes.

    Args:
        name: name of the memfd, as the system shows it. It need not be unique.
    """

    def __init__(self, name: str = "tierkv-arena") -> None:
        self._name = name
        self._fd = -1
        self._length = 0

    def map(self, length: int) -> mmap.mmap:
        """Allocate and map ``length`` bytes. Call once.

        Raises:
            OSError: the machine has less memory. The kernel would overcommit, and kill a process later.
        """
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if length > physical:
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: this machine has {physical} bytes")
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, length)
        self._length = length
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return mmap.mmap(self._fd, length)

    def arena_handle(self, arena: HostArena) -> ArenaHandle:
        """Return the handle of an arena over this memory.

        Raises:
            EngineProtocolError: the memory is closed, or was never mapped.
        """
        memory = self.memory_handle()
        return ArenaHandle(memory.pid, memory.fd, memory.device, memory.inode, arena.num_slots, arena.slot_bytes)

    def memory_handle(self) -> MemoryHandle:
        """Return the handle of this memory.

        Raises:
            EngineProtocolError: the memory is closed, or was never mapped.
        """
        if self._fd < 0:
            raise EngineProtocolError("the stack is closed: its arena cannot be shared any more")
        stat = os.fstat(self._fd)
        return MemoryHandle(os.getpid(), self._fd, stat.st_dev, stat.st_ino, self._length)

    def close(self) -> None:
        """Stop further processes from attaching. Existing mappings stay valid. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_named_memory(name: str) -> list[bytes]:
    """Return the contents of all shared memory of a name, in this process and in others that it may inspect.

    For data that is needed before a handle can be sent. The name must be unique to one engine.
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
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                yield from (process / "fd").iterdir()


def attach_arena(handle: ArenaHandle) -> HostArena:
    """Map the arena that another process holds.

    Raises:
        EngineProtocolError: that process has ended or closed its stack, or this one may not access it.
    """
    return HostArena(
        handle.num_slots * handle.slot_bytes, handle.slot_bytes - HEADER_BYTES, lambda length: _map(handle, length)
    )


def attach_memory(handle: MemoryHandle) -> mmap.mmap:
    """Map memory that another process holds.

    Raises:
        EngineProtocolError: that process has ended or closed its stack, or this one may not access it.
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
