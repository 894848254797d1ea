"""Copies of chunks from one store to another: only whole frames, byte for byte; a repeated copy continues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from tierkv.abc import DamagedEntry, StoredFrame, StoredNamespace, SupportsRoomLimit
from tierkv.errors import CorruptFrameError, OutOfSpaceError, TierKVError
from tierkv.frames.frame import HEADER_BYTES, pad
from tierkv.stores.findings import Finding, FindingKind, Progress, no_progress
from tierkv.stores.folder import FOLDER, Exported, note_export
from tierkv.stores.places import Place
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import ReadFrame, Store
from tierkv.stores.verification import shortfall_of_export
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

ASKED_AT_ONCE = 256
"""Chunks per question whether the target has them."""
SPARE_BYTES = 16 << 20
"""Room of a target without a capacity beyond twice what is copied to it: for its index, and for chunks stored
meanwhile."""
FAILURES_MAX = 64
"""Failed writes in a row after which a copy ends: the target is out of service."""


@dataclass(slots=True)
class Copied:
    """Sums of a copy; of a dry run, what it would copy."""

    chunks: int = 0
    """Chunks that were copied."""
    frame_bytes: int = 0
    """Bytes of their frames."""
    present: int = 0
    """Chunks that the target had already."""
    gone: int = 0
    """Chunks that another process removed meanwhile."""
    findings: int = 0
    """Number of findings."""
    is_full: bool = False
    """Whether the target has no more room."""
    named: set[str] = field(default_factory=set)
    """Chosen keys that name a listed chunk."""


class _Ended(Exception):  # noqa: N818 - no error: it ends a copy from inside
    """The copy cannot go on; carries its last finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def fitted(place: Place, namespace: Namespace, source: Store) -> Place:
    """Return a place with room for all chunks of a store, if it is bounded and has no capacity of its own.

    A backend with preallocated files would otherwise take room for a tier as large as the file system.

    Raises:
        BackendError: the source cannot be listed.
    """
    if place.capacity_bytes is not None or not place.backend.capabilities.bounded or place.backend.at_rest is None:
        return place
    held_bytes = 0
    with contextlib.suppress(TierKVError):  # a new place
        there = [each for each in place.list_namespaces() if isinstance(each, StoredNamespace)]
        held_bytes = sum(each.held_bytes or 0 for each in there if each.namespace == namespace)
    sizes = (each.frame_bytes for each in source.list_frames(keys=False) if isinstance(each, StoredFrame))
    wanted_bytes = sum(pad(size, HEADER_BYTES) + 2 * HEADER_BYTES for size in sizes)
    return replace(place, capacity_bytes=held_bytes + 2 * wanted_bytes + SPARE_BYTES)


class StoreCopy:
    """Copy of the chosen chunks of one store to another. One use.

    Args:
        source: open for reading.
        target: open for writing; None: a dry run to a namespace that is not there yet.
        target_place: where the target is.
        sums: added to.
        chosen: which chunks.
        read_back: whether each written chunk is read from the target and checked.
        dry_run: whether nothing is written.
        progress: receives what was copied.
    """

    def __init__(  # noqa: PLR0913 - the two ends, and how to copy
        self,
        source: Store,
        target: Store | None,
        target_place: Place,
        sums: Copied,
        *,
        chosen: ChunkFilter | None = None,
        read_back: bool = True,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        self._source = source
        self._target = target
        self._place = target_place
        self._sums = sums
        self._chosen = chosen or ChunkFilter()
        self._read_back = read_back
        self._dry_run = dry_run
        self._progress = progress
        self._room_bytes = room_of_new(target_place) if target is None else room_of(target)
        self._damage: list[DamagedEntry] = []
        self._failures = 0
        self._listed = 0

    def run(self) -> Iterator[Finding]:
        """Copy; yield what is wrong.

        Raises:
            BackendError: a store cannot be listed.
        """
        before = self._sums.findings
        try:
            yield from self._noted(self._copied())
        except _Ended as end:
            yield from self._noted(iter([end.finding]))
        if self._chosen.is_open:
            yield from self._noted(self._compared())
            if self._place.backend is FOLDER and not self._dry_run and self._sums.findings == before:
                self._complete_export()

    def _noted(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        for finding in findings:
            self._sums.findings += 1
            yield finding

    def _copied(self) -> Iterator[Finding]:
        if self._dry_run:
            for frame in self._missing():
                if not self._has_room(frame.frame_bytes):
                    raise self._full("its capacity would be reached")
                self._sums.chunks += 1
                self._sums.frame_bytes += frame.frame_bytes
                self._progress(1, frame.frame_bytes)
            yield from self._listing_damage()
            return
        for batch in self._source.read_all(self._missing()):
            yield from self._listing_damage()
            yield from self._store(batch)
            self._progress(len(batch), sum(found.listed.frame_bytes for found in batch))
        yield from self._listing_damage()

    def _missing(self) -> Iterator[StoredFrame]:
        """Yield the chosen chunks that the target lacks."""
        frames = self._wanted()
        while batch := list(islice(frames, ASKED_AT_ONCE)):
            keys = [each.key for each in batch if each.key is not None]
            answers = [False] * len(keys) if self._target is None else self._target.contains(keys)
            for frame, answer in zip(batch, answers, strict=True):
                if answer is True:
                    self._sums.present += 1
                else:
                    yield frame  # where the target cannot tell, its write will

    def _wanted(self) -> Iterator[StoredFrame]:
        for entry in self._source.list_frames():
            if isinstance(entry, DamagedEntry):
                self._damage.append(entry)
                continue
            self._listed += 1
            if self._chosen.matches(entry):
                self._sums.named |= self._chosen.names_of(entry)
                yield entry

    def _store(self, batch: list[ReadFrame]) -> Iterator[Finding]:
        """Write the sound chunks of a batch, as far as the target has room, and verify them.

        Raises:
            _Ended: the target is full, or out of service.
        """
        target = self._target
        if target is None:
            return
        sound: list[ReadFrame] = []
        for found in batch:
            finding = self._why_not(found)
            if finding is not None:
                yield finding
            elif found.header is None:
                self._sums.gone += 1
            else:
                sound.append(found)
        taken = [found for found in sound if self._has_room(max(found.listed.frame_bytes, len(found.frame)))]
        full = self._full("its capacity is reached") if len(taken) < len(sound) else None
        stored: list[ReadFrame] = []
        failed: list[tuple[ReadFrame, TierKVError]] = []
        for found, error in self._written(target, taken):
            if error is None:
                self._failures = 0
                stored.append(found)
            elif isinstance(error, OutOfSpaceError):
                full = full or self._full(str(error))
            else:
                failed.append((found, error))
        yield from self._verified(target, stored)
        if full is not None:
            raise full  # the other failures of the batch follow from it, and the repeated copy writes those chunks
        for found, error in failed:
            yield self._not_written(found, error)

    @staticmethod
    def _written(target: Store, frames: list[ReadFrame]) -> Iterator[tuple[ReadFrame, TierKVError | None]]:
        requests = [
            target.for_write(found.listed.key, found.frame, found.header, found.listed.rank)
            for found in frames
            if found.header is not None and found.listed.key is not None
        ]
        return zip(frames, target.write(requests), strict=True)

    def _not_written(self, found: ReadFrame, error: TierKVError) -> Finding:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            reason = f"{FAILURES_MAX} writes failed in a row, the last one: {error}. A repeated copy continues"
            raise _Ended(self._finding(FindingKind.INCOMPLETE, None, reason))
        return self._finding(FindingKind.NOT_WRITTEN, found.listed.key, str(error))

    def _verified(self, target: Store, stored: list[ReadFrame]) -> Iterator[Finding]:
        """Read what was written and compare it. Absent is no fault: a shared target may remove it at any time."""
        wrong: dict[Key | None, str] = {}
        if self._read_back:
            headers = {found.listed.key: found.header for found in stored}
            for batch in target.read_all([found.listed for found in stored]):
                for found in batch:
                    if found.error is not None:
                        wrong[found.listed.key] = str(found.error)
                    elif found.header is not None and found.header != headers[found.listed.key]:
                        wrong[found.listed.key] = "it is another frame"
        for found in stored:
            if found.listed.key in wrong:
                reason = f"read back, it is not what was written: {wrong[found.listed.key]}"
                yield self._finding(FindingKind.NOT_WRITTEN, found.listed.key, reason)
            else:
                self._sums.chunks += 1
                self._sums.frame_bytes += found.listed.frame_bytes

    def _why_not(self, found: ReadFrame) -> Finding | None:
        """Return why a chunk cannot be copied; None: it can be, or it is gone."""
        key, header = found.listed.key, found.header
        if found.error is not None:
            kind = FindingKind.DAMAGED if isinstance(found.error, CorruptFrameError) else FindingKind.UNREADABLE
            return self._finding(kind, key, f"not copied: {found.error}", self._source)
        if header is None:
            if self._source.is_live:
                return None
            return self._finding(FindingKind.MISSING, key, "it is listed, and not there", self._source)
        place = self._place
        if place.concealing_codec not in (None, header.codec) and not place.accepts_clear:
            reason = f"tier {place.name!r} keeps frames of codec {place.concealing_codec!r} only, and this one has "
            return self._finding(FindingKind.REFUSED, key, f"{reason}{header.codec!r}")
        if header.approximate and not place.accepts_lossy:
            return self._finding(FindingKind.REFUSED, key, f"an approximation; tier {place.name!r} has lossy = false")
        return None

    def _has_room(self, frame_bytes: int) -> bool:
        """Count a frame against the room of the target. Returns whether it has any left."""
        if self._room_bytes is None:
            return True
        self._room_bytes -= frame_bytes
        return self._room_bytes >= 0

    def _full(self, reason: str) -> _Ended:
        self._sums.is_full = True
        text = f"{self._place.where} is full ({reason}): make room and repeat the copy, which continues"
        return _Ended(self._finding(FindingKind.INCOMPLETE, None, text))

    def _listing_damage(self) -> Iterator[Finding]:
        while self._damage:
            entry = self._damage.pop()
            fingerprint = self._source.namespace.fingerprint().hex()
            yield Finding(FindingKind.DAMAGED, self._source.place.name, fingerprint, entry.where, entry.reason)

    def _compared(self) -> Iterator[Finding]:
        """Compare what was listed with the manifest of an export folder."""
        if not self._sums.is_full:
            yield from shortfall_of_export(self._source, self._listed)

    def _complete_export(self) -> None:
        if self._target is not None:
            chunks = size = 0
            for frame in self._target.list_frames(keys=False):
                if isinstance(frame, StoredFrame):
                    chunks, size = chunks + 1, size + frame.frame_bytes
            note_export(Path(self._place.options.path), Exported(self._target.namespace, chunks, size))

    def _finding(self, kind: FindingKind, key: Key | None, reason: str, store: Store | None = None) -> Finding:
        name = self._place.name if store is None else store.place.name
        fingerprint = self._source.namespace.fingerprint().hex()
        return Finding(kind, name, fingerprint, (key or b"").hex() or self._source.namespace.model, reason)


def room_of(target: Store) -> int | None:
    """Return the bytes of frames that a bounded store still takes; None: no bound is known."""
    capacity = target.place.capacity_bytes
    if capacity is None or not target.capabilities.bounded:
        return None
    backend = target.backend
    room = min(capacity, backend.room_bytes) if isinstance(backend, SupportsRoomLimit) else capacity
    return room - sum(each.frame_bytes for each in target.list_frames(keys=False) if isinstance(each, StoredFrame))


def room_of_new(place: Place) -> int | None:
    """Return the bytes of frames that a place takes which has nothing of a namespace yet; None: no bound is known."""
    return place.capacity_bytes if place.backend.capabilities.bounded else None


def is_same_place(one: Place, other: Place) -> bool:
    """Whether two places are one."""
    return one.backend.name.removesuffix("-read-only") == other.backend.name.removesuffix("-read-only") and (
        one.where.rstrip("/") == other.where.rstrip("/")
        or ("://" not in one.where and Path(one.where).resolve() == Path(other.where).resolve())
    )


def is_nested(one: Place, other: Place) -> bool:
    """Whether one of two directories is inside of the other. A tier refuses a directory that holds other files."""
    first, second = (_directory(place) for place in (one, other))
    return first is not None and second is not None and (first in second.parents or second in first.parents)


def _directory(place: Place) -> Path | None:
    where = place.where.removeprefix("file://")
    return None if "://" in where else Path(where).expanduser().resolve()
