"""Limits of a disk: a preallocated file, or a file per frame, with O_DIRECT and as many threads as the tier has.

Adjacent frames are moved by one vectored call of up to 4 MiB: a limit of one call per frame would be no limit for small
frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from benchmarks.tiers.rig import Frames

CALL_BYTES = 4 << 20
"""Bytes per vectored call, or one frame where that is longer."""


class RawDisk:
    """Frames in a folder, without index, checks or batches. Use it as a context; the files stay.

    Attributes:
        direct: whether the file system takes O_DIRECT; without it everything goes through the page cache.
    """

    def __init__(self, folder: Path, frames: Frames, threads: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._frames = frames
        self._buffers = [frames.arena.slot(ref.slot) for ref in frames.slots]
        self._pool = ThreadPoolExecutor(threads, "raw")
        self._direct_flag = _direct_flag(folder)
        self.direct = bool(self._direct_flag)
        self._fd = os.open(folder / "segment", os.O_RDWR | os.O_CREAT | self._direct_flag, 0o600)
        os.posix_fallocate(self._fd, 0, len(self._buffers) * frames.frame_bytes)
        os.fsync(self._fd)

    def put(self) -> None:
        """Overwrite all frames in the file, then force them to the device."""
        self._each_call(lambda offset, buffers: os.pwritev(self._fd, buffers, offset))
        os.fdatasync(self._fd)

    def get(self) -> None:
        """Read all frames from the file into their slots."""
        self._each_call(lambda offset, buffers: os.preadv(self._fd, buffers, offset))

    def put_files(self) -> None:
        """Write each frame to a new file, then rename that. Nothing is forced to the device but what O_DIRECT does."""
        self._each(self._put_file)

    def remove_files(self) -> None:
        """Undo :meth:`put_files`."""
        for path in self._folder.glob("*.frame"):
            path.unlink()

    def drop_cache(self) -> None:
        """Drop the page cache of the file, so that the next read uses the device also without O_DIRECT."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _put_file(self, number: int, buffer: memoryview) -> None:
        temporary = self._folder / f"{number}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct_flag, 0o600)
        try:
            self._whole(os.pwrite(fd, buffer, 0), len(buffer))
        finally:
            os.close(fd)
        temporary.rename(self._folder / f"{number}.frame")

    def _each_call(self, move: Callable[[int, list[memoryview]], int]) -> None:
        size = self._frames.frame_bytes
        count = max(1, CALL_BYTES // size)

        def call(start: int) -> None:
            buffers = self._buffers[start : start + count]
            self._whole(move(start * size, buffers), size * len(buffers))

        list(self._pool.map(call, range(0, len(self._buffers), count)))

    def _each(self, move: Callable[[int, memoryview], None]) -> None:
        list(self._pool.map(move, range(len(self._buffers)), self._buffers))

    @staticmethod
    def _whole(count: int, size: int) -> None:
        if count != size:
            raise RuntimeError(f"{count} bytes were moved of {size}")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file and end the threads."""
        self._pool.shutdown()
        os.close(self._fd)
        for buffer in self._buffers:
            buffer.release()


def _direct_flag(folder: Path) -> int:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT
