"""Verification: read every chunk of a store and check it; remove what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc import DamagedEntry, StoredFrame
from tierkv.errors import CorruptFrameError, TierKVError
from tierkv.stores.export_sums import ExportSums
from tierkv.stores.findings import Finding, FindingKind, Progress, no_progress
from tierkv.stores.folder import FOLDER, read_manifest
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import ReadFrame, Store


@dataclass(slots=True)
class Verified:
    """Sums of a verification."""

    chunks: int = 0
    """Chunks that were read and are whole."""
    frame_bytes: int = 0
    """Bytes of their frames."""
    findings: int = 0
    """Number of findings."""
    removed: int = 0
    """Damaged chunks that were removed."""
    gone: int = 0
    """Chunks that another process removed meanwhile."""


def verify_store(
    store: Store,
    sums: Verified,
    *,
    chosen: ChunkFilter | None = None,
    repair: bool = False,
    progress: Progress = no_progress,
) -> Iterator[Finding]:
    """Read and check every chosen chunk. Yield what is wrong.

    Args:
        store: open; for writing, if it is to be repaired.
        sums: added to.
        chosen: which chunks; None: all.
        repair: whether damaged chunks are removed. One that cannot be read is kept: its device may recover.
        progress: receives what was read.

    Raises:
        BackendError: the store cannot be listed.
    """
    chosen = chosen or ChunkFilter()
    damage: list[DamagedEntry] = []
    listed = _Listing(store, chosen, damage)
    manifest = ExportSums(store) if repair else None
    before = sums.removed
    for batch in store.read_all(listed):
        yield from _damaged_entries(store, sums, damage, manifest)
        for found in batch:
            finding = _judged(store, sums, found, manifest)
            if finding is not None:
                sums.findings += 1
                yield finding
        progress(len(batch), sum(found.listed.frame_bytes for found in batch))
    yield from _damaged_entries(store, sums, damage, manifest)
    if chosen.is_open:
        for finding in shortfall_of_export(store, listed.count - (sums.removed - before)):
            sums.findings += 1
            yield finding


def shortfall_of_export(store: Store, listed: int) -> Iterator[Finding]:
    """Yield what an export folder lacks by its manifest; nothing for a tier.

    Args:
        store: open.
        listed: chunks that its listing found, damaged ones included.

    Raises:
        BackendError: the manifest cannot be read.
    """
    if store.place.backend is not FOLDER:
        return
    for exported in read_manifest(Path(store.place.options.path)):
        if exported.namespace == store.namespace:
            model = store.namespace.model
            if exported.chunks is None:
                reason = f"the export was interrupted, and {listed} chunks are there. Repeat the export to complete it"
                yield _finding(store, FindingKind.INCOMPLETE, model, reason)
            elif listed < exported.chunks:
                reason = f"the manifest has {exported.chunks} chunks, and {listed} are there"
                yield _finding(store, FindingKind.MISSING, model, reason)


class _Listing:
    """Chosen frames of a store. Damage that the listing finds goes to ``damage``."""

    def __init__(self, store: Store, chosen: ChunkFilter, damage: list[DamagedEntry]) -> None:
        self._store = store
        self._chosen = chosen
        self._damage = damage
        self.count = 0
        """Entries listed so far."""

    def __iter__(self) -> Iterator[StoredFrame]:
        for entry in self._store.list_frames():
            self.count += 1
            if isinstance(entry, DamagedEntry):
                self._damage.append(entry)
            elif self._chosen.matches(entry):
                yield entry


def _judged(store: Store, sums: Verified, found: ReadFrame, manifest: ExportSums | None) -> Finding | None:
    key = found.listed.key or b""
    if found.header is not None:
        sums.chunks += 1
        sums.frame_bytes += found.listed.frame_bytes
        return None
    if found.error is None:
        if store.is_live:
            sums.gone += 1
            return None
        return _finding(store, FindingKind.MISSING, key.hex(), "it is listed, and not there")
    if not isinstance(found.error, CorruptFrameError):
        return _finding(store, FindingKind.UNREADABLE, key.hex(), str(found.error))
    action = ""
    if manifest is not None:
        manifest.take_out([found.listed])
        failed = store.remove_damaged(found.listed.key, str(found.error)) if found.listed.key else None
        manifest.put_back([] if failed is None else [found.listed])
        sums.removed += failed is None
        action = "removed" if failed is None else f"not removed: {failed}"
    return _finding(store, FindingKind.DAMAGED, key.hex(), str(found.error), action)


def _damaged_entries(
    store: Store, sums: Verified, damage: list[DamagedEntry], manifest: ExportSums | None
) -> Iterator[Finding]:
    while damage:
        entry = damage.pop()
        action = ""
        if manifest is not None and entry.remove is not None:
            unknown = [StoredFrame(None, 0)]
            manifest.take_out(unknown)
            try:
                entry.remove()
                sums.removed += 1
                action = "removed"
            except TierKVError as error:
                manifest.put_back(unknown)
                action = f"not removed: {error}"
        sums.findings += 1
        yield _finding(store, FindingKind.DAMAGED, entry.where, entry.reason, action)


def _finding(store: Store, kind: FindingKind, subject: str, reason: str, action: str = "") -> Finding:
    return Finding(kind, store.place.name, store.namespace.fingerprint().hex(), subject, reason, action)
