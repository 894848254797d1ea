"""The conformance kit on export folders: its contract of verbs, and the tools that list and change stores.

A folder is a backend that no stack has as a tier, so the parts of the kit about stacks and installation do not apply.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.stores.folder import FOLDER, Exported, FolderOptions, note_export
from tierkv.stores.store import Store
from tierkv.testing.conformance.at_rest import AtRestTests
from tierkv.testing.conformance.backend.batches import BatchTests
from tierkv.testing.conformance.backend.contract import ContractTests
from tierkv.testing.conformance.backend.damage import DamageTests
from tierkv.testing.conformance.backend.keys import KeyTests
from tierkv.types.keys import Key


class FrameFiles:
    """Files of one namespace, found by their names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def file(self, key: Key) -> Path:
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        found = list(self.directory.rglob(f"{name}.frame"))
        if not found:
            raise KeyError(key.hex())
        return found[0]

    def read(self, key: Key) -> bytes:
        return self.file(key).read_bytes()

    def write(self, key: Key, data: bytes) -> None:
        self.file(key).write_bytes(data)

    def remove(self, key: Key) -> None:
        self.file(key).unlink()

    def count(self) -> int:
        return len(list(self.directory.rglob("*.frame")))


class TestExportFolder(AtRestTests, ContractTests, BatchTests, KeyTests, DamageTests):
    """An export folder."""

    plugin = FOLDER
    raw_live = True

    def make_options(self, place: Path) -> FolderOptions:
        return FolderOptions(str(place))

    def raw(self, place: Path, context: BackendContext) -> FrameFiles:
        return FrameFiles(place / context.namespace.fingerprint().hex())

    def _store_frames(self, store: Store, frames: dict[Key, bytes]) -> None:
        """Write the chunks, and end the export: without that, a copy of the folder reports it as interrupted."""
        super()._store_frames(store, frames)
        sums = Exported(store.namespace, len(frames), sum(map(len, frames.values())))
        note_export(Path(store.place.where), sums)
