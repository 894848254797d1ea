"""Chunks that a backend has and the framework does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from tierkv.abc.backend import Entry, WriteRequest, WriteResult
from tierkv.errors import OutOfSpaceError
from tierkv.types.keys import Key

UNLISTED_PER_FRAME = 8
"""Unlisted chunks that are deleted at once for each frame without room: they may be smaller than it."""


class UnlistedChunks:
    """Chunks at a place that a backend opened again after its scan, such as a file system mounted over the former one.

    The framework lists chunks at its start only, so it neither reads nor evicts these. In a full tier the oldest of
    them make room for new ones. Both methods may be called on several threads at once.
    """

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}  # oldest first
        self._lock = threading.Lock()  # held for a few instructions, or while entries are taken

    def replace(self, entries: Iterable[Entry]) -> int:
        """Take the chunks of the new place, oldest first, instead of those of the former one; return their number."""
        with self._lock:
            self._keys = dict.fromkeys(entry.key for entry in entries)
            return len(self._keys)

    def write_over(
        self,
        requests: Sequence[WriteRequest],
        results: list[WriteResult],
        write: Callable[[Sequence[WriteRequest]], list[WriteResult]],
        delete: Callable[[Sequence[Key]], list[WriteResult]],
    ) -> list[WriteResult]:
        """Write frames that had no room again, in place of unlisted chunks. Chunks that were written are listed.

        Args:
            requests: of a write.
            results: of the same write; changed for the frames that are written now.
            write: verb of the backend.
            delete: verb of the backend. Once it fails, nothing more is tried.

        Returns:
            ``results``.
        """
        while self._keys:
            full = [number for number, result in enumerate(results) if isinstance(result, OutOfSpaceError)]
            with self._lock:
                for request, result in zip(requests, results, strict=True):
                    if result is None:
                        self._keys.pop(request.key, None)
                keys = list(islice(self._keys, UNLISTED_PER_FRAME * len(full)))
                for key in keys:
                    del self._keys[key]
            if not keys or any(delete(keys)):
                break
            for number, result in zip(full, write([requests[n] for n in full]), strict=True):
                results[number] = result
        return results
