"""Sums of an export's manifest while chunks are removed from it: a removal that is killed leaves no false alarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierkv.abc import DamagedEntry, StoredFrame
from tierkv.stores.folder import FOLDER, note_removal, restore_sums
from tierkv.stores.store import Store


class ExportSums:
    """Sums of one namespace in the manifest. A store that is no export folder has none: nothing happens.

    The manifest never has more chunks than there are. So :meth:`take_out` is called before chunks are deleted.

    Args:
        store: open for writing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._path = Path(store.place.options.path) if store.place.backend is FOLDER else None
        self._is_exact = False

    def take_out(self, frames: Sequence[StoredFrame]) -> None:
        """Note that chunks are about to be removed.

        Raises:
            BackendError: the manifest cannot be read or written.
        """
        if self._path is not None and frames:
            self._correct(self._path)
            size = sum(each.frame_bytes for each in frames)
            note_removal(self._path, self._store.namespace, len(frames), size)

    def put_back(self, frames: Sequence[StoredFrame]) -> None:
        """Note that chunks could not be removed.

        Raises:
            BackendError: the manifest cannot be read or written.
        """
        if self._path is not None and frames:
            size = sum(each.frame_bytes for each in frames)
            note_removal(self._path, self._store.namespace, -len(frames), -size)

    def _correct(self, path: Path) -> None:
        """Before the first removal, count what a killed one took out of the manifest and left in the folder."""
        if self._is_exact:
            return
        self._is_exact = True
        chunks = size = 0
        for entry in self._store.list_frames(keys=False):
            chunks += 1
            size += 0 if isinstance(entry, DamagedEntry) else entry.frame_bytes
        restore_sums(path, self._store.namespace, chunks, size)
