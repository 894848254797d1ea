"""Locks of files that end with the process that took them, whatever other processes it makes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref


class HeldLock:
    """Descriptor on which this process holds a lock of ``flock``. May be used on any thread.

    Such a lock lives as long as any copy of its descriptor. A process made by ``os.fork`` closes its copy at once: it
    must not keep the directory of an engine that has ended. There, :meth:`release` does nothing: it would end
    the engine's lock.

    Args:
        fd: of the locked file; :meth:`release` closes it.

    Attributes:
        fd: the descriptor; -1 in a process made by ``os.fork``, and after the release.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _held.add(self)

    def release(self) -> None:
        """End the lock, also where a copy of the descriptor lives on, and close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # a file system without locks; the descriptor must not stay
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _close_in_fork() -> None:
    for lock in list(_held):
        fd, lock.fd = lock.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_fork)
