"""Read-only backend of an fsspec tier: for a namespace that other engines fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.abc import (
    DamagedEntry,
    ProbeResult,
    ReadRequest,
    ReadResult,
    StoredFrame,
    WriteRequest,
    WriteResult,
)
from tierkv.errors import BackendError
from tierkv.types.keys import Key
from tierkv_fsspec.backend import FsspecBackend


class FsspecReader:
    """Reads of an :class:`FsspecBackend`, which it holds; each write and each deletion is an error.

    Args:
        backend: open; closed by :meth:`close`.
        tier: name of the tier, for errors.
    """

    def __init__(self, backend: FsspecBackend, *, tier: str) -> None:
        self._backend = backend
        self._tier = tier

    def contains(self, keys: Sequence[Key]) -> list[ProbeResult]:
        """Whether each key's object is stored."""
        return self._backend.contains(keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Fetch each object whole into its caller's buffer."""
        return self._backend.read_into(requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._refusal(request.key) for request in requests]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Refuse: one error per key."""
        return [self._refusal(key) for key in keys]

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame | DamagedEntry]:
        """Yield every object of the namespace; nothing of it can be removed."""
        for found in self._backend.list_frames(keys=keys):
            yield found if isinstance(found, StoredFrame) else found._replace(remove=None)

    def close(self) -> None:
        """Start no further request. A call in flight ends by its timeouts."""
        self._backend.close()

    def _refusal(self, key: Key) -> BackendError:
        url = self._backend.object_url(key)
        message = f'{url} is not written or removed: the tier\'s backend is "fsspec-read-only"'
        return BackendError(message, tier=self._tier, key=key)
