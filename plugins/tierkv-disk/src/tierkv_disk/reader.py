"""Reader of a namespace without its lock: for tools that look at a disk tier, also beside the engine that owns it.

It reads the index log once, at open. The owner may delete frames and use their pages again meanwhile: a read then
gives the bytes of another frame, which the check of its header finds. A second reader sees the newer log.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierkv.abc import DamagedEntry, ReadRequest, ReadResult, StoredFrame, WriteRequest, WriteResult
from tierkv.errors import BackendError
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_disk.directory.files import open_file
from tierkv_disk.directory.layout import LOG_NAME
from tierkv_disk.extents import PAGE_BYTES, page_of, read_extent, segment_of
from tierkv_disk.failures import as_tier_error
from tierkv_disk.log.index_log import LogIdentity
from tierkv_disk.recovery.recovery import RecoveryReport, replay
from tierkv_disk.segments.segment_files import segment_path
from tierkv_disk.space.table import Table


class DiskReader:
    """Stored frames as of the open. Verbs may be called on any threads.

    Args:
        directory: of the namespace.
        namespace: expected namespace.
        slot_bytes: slot size of a namespace of format 1; 0 for the current format.
        tier: name of the tier, for messages.

    Raises:
        BackendError: the index log is missing, or its header is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, directory: Path, namespace: Namespace, slot_bytes: int, tier: str) -> None:
        self._directory = directory
        self._tier = tier
        self._table = Table()
        self._lock = threading.Lock()
        self._files: dict[int, int] = {}
        self._closed = False
        self._report = RecoveryReport()
        log = directory / LOG_NAME
        try:
            fd = open_file(log, os.O_RDONLY)
        except FileNotFoundError:
            if any(directory.glob("segment-*.dat")):
                raise BackendError(f"{log} is missing: {_REBUILT}", tier=tier) from None
            return  # a new namespace
        try:
            identity = LogIdentity(namespace.fingerprint())
            replay(fd, identity, slot_bytes, self._table, self._report)
        finally:
            os.close(fd)
        if not self._report.log.header_ok:
            raise BackendError(f"the header of {log} is damaged: {_REBUILT}", tier=tier)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key was stored at the open."""
        return [key in self._table.entries for key in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame to its caller's buffer."""
        return [self._read(request) for request in requests]

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield damaged records of the log, then every stored frame, oldest first. Their times are unknown."""
        del keys  # they cost nothing here
        for reason in self._report.losses():
            yield DamagedEntry(str(self._directory), f"{reason}: {_REBUILT}")
        for key, extent in self._table.entries.items():
            _, frame_bytes, rank = read_extent(extent)
            yield StoredFrame(key, frame_bytes, None, rank)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._refusal(request.key) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._refusal(key) for key in keys]

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._closed = True
            while self._files:
                os.close(self._files.popitem()[1])

    def _read(self, request: ReadRequest) -> ReadResult:
        found = self._table.find_frame(request.key)
        if found is None:
            return None
        runs, size = found
        if size > len(request.buffer):
            message = f"a frame of {size} bytes does not fit the buffer of {len(request.buffer)}"
            return BackendError(message, tier=self._tier, key=request.key)
        start = 0
        try:
            for address, pages in runs:
                end = min(size, start + pages * PAGE_BYTES)
                fd, offset = self._file(segment_of(address)), page_of(address) * PAGE_BYTES
                while start < end and (count := os.preadv(fd, [request.buffer[start:end]], offset)):
                    start, offset = start + count, offset + count
        except OSError as error:
            return as_tier_error(error, f"cannot read in {self._directory}", tier=self._tier, key=request.key)
        return start

    def _file(self, number: int) -> int:
        with self._lock:
            if self._closed:
                raise BackendError("closed")
            if number not in self._files:
                self._files[number] = open_file(segment_path(self._directory, number), os.O_RDONLY)
                with contextlib.suppress(OSError):  # a file system without it reads all the same
                    os.posix_fadvise(self._files[number], 0, 0, os.POSIX_FADV_NOREUSE)
            return self._files[number]

    def _refusal(self, key: Key) -> BackendError:
        return BackendError(f"{self._directory} is open for reading only", tier=self._tier, key=key)


_REBUILT = "it is rebuilt from the segments when the namespace is opened for writing (`tierkv verify --repair`)"
