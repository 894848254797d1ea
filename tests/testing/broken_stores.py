"""Broken stores: mistakes in restarts, damage, room. Each is plain_files, broken in one way."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from broken_registry import noticed_by
from plain_files import PlainFiles, PlainOptions

from tierkv.abc import BackendContext, Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.types.keys import Key

# -- restarts --------------------------------------------------------------------------------------------------------


@noticed_by("test_the_last_write_counts")
class RestoresBackups(PlainFiles):
    """Keeps what it replaces, and prefers it at the next start."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        for backup in self.root.glob("*.old"):
            backup.rename(backup.with_suffix(".frame"))

    def write_one(self, request: WriteRequest) -> WriteResult:
        path = self.path(request.key)
        if path.exists():
            path.rename(path.with_suffix(".old"))
        return super().write_one(request)


@noticed_by("test_scan_tells_the_same_each_time")
class RoundsAfterARestart(PlainFiles):
    """Knows lengths of what it wrote itself, and pages of the rest."""

    def scan(self) -> Iterable[Entry]:
        for entry in super().scan():
            known = entry.key in self.used_bytes
            yield entry if known else Entry(entry.key, -(-entry.frame_bytes // 4096) * 4096)

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.used_bytes = {}


@noticed_by("test_scan_tells_ranks_in_write_order", keeps_ranks=True)
class ForgetsRanksAtARestart(PlainFiles):
    """Knows ranks and order in memory alone."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        self.ranks: dict[Key, int] = {}
        super().__init__(context, options)

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.ranks.pop(request.key, None)
        self.ranks[request.key] = request.rank
        return super().write_one(request)

    def scan(self) -> Iterable[Entry]:
        stored = {entry.key: entry.frame_bytes for entry in super().scan()}
        order = [*(key for key in self.ranks if key in stored), *(key for key in stored if key not in self.ranks)]
        return [Entry(key, stored[key], self.ranks.get(key, 0)) for key in order]


@noticed_by("test_another_capacity_is_not_a_fresh_start")
class StartsAnewForAnotherCapacity(PlainFiles):
    """Is formatted for one capacity."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        note = self.root / "capacity"
        if note.exists() and note.read_text() != str(context.capacity_bytes):
            self.delete([entry.key for entry in self.scan()])
        note.write_text(str(context.capacity_bytes))


@noticed_by("test_longer_frames_are_opened_or_refused")
class KeepsItsFirstLength(PlainFiles):
    """Cuts frames at the length for which it was made."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        note = self.root / "length"
        if not note.exists():
            note.write_text(str(context.frame_bytes_max))
        self.length = int(note.read_text())

    def write_one(self, request: WriteRequest) -> WriteResult:
        return super().write_one(WriteRequest(request.key, request.frame[: self.length]))


@noticed_by("test_killed_while_opening")
class HalfMade(PlainFiles):
    """Takes its own half-made directory for a foreign one."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        ready = Path(options.path) / "ready"
        if Path(options.path).exists() and not ready.exists():
            raise BackendError(f"{options.path} is not ours")
        Path(options.path).mkdir(exist_ok=True)
        if not ready.exists():
            time.sleep(0.3)
        ready.touch()
        super().__init__(context, options)


@noticed_by("test_closing_brings_everything_down")
class WritesOneBatchLater(PlainFiles):
    """Writes a batch when the next one comes, and the last one never."""

    later: list[tuple[Key, bytes]]

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.later = []

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.later.append((request.key, bytes(request.frame)))
        if len(self.later) > 1:
            key, frame = self.later.pop(0)
            return super().write_one(WriteRequest(key, memoryview(frame)))
        return None


# -- damage ----------------------------------------------------------------------------------------------------------


@noticed_by("test_raw_access_tells_the_truth")
class DeletesInMemory(PlainFiles):
    """Hides what it should delete."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.gone: set[Key] = set()

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        self.gone.update(keys)
        return [None] * len(keys)

    def read_one(self, request: ReadRequest) -> ReadResult:
        return None if request.key in self.gone else super().read_one(request)


@noticed_by(
    "test_a_flipped_bit_stays_with_one_key",
    "test_a_truncated_entry_stays_with_one_key",
    "test_an_empty_entry_stays_with_one_key",
    "test_rubbish_stays_with_one_key",
    "test_a_removed_entry_stays_with_one_key",
    "test_swapped_entries_harm_nobody_else",
    "test_a_damaged_entry_can_be_deleted",
    "test_bit_flip_at_rest_is_a_miss",
    "test_truncated_at_rest_is_a_miss",
    "test_empty_at_rest_is_a_miss",
    "test_rubbish_at_rest_is_a_miss",
    "test_removed_at_rest_is_a_miss",
    "test_swapped_at_rest_is_a_miss",
    "test_foreign_namespace_at_rest_is_a_miss",
    "test_another_layout_at_rest_is_a_miss",
)
class AllOrNothing(PlainFiles):
    """Sums up its files at close, and distrusts all of them if one has changed."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        manifest = self.root / "manifest"
        self.distrusts = manifest.exists() and manifest.read_text() != self.sum()

    def sum(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.root.glob("*.frame")):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def read_one(self, request: ReadRequest) -> ReadResult:
        return BackendError("something is damaged") if self.distrusts else super().read_one(request)

    def close(self) -> None:
        if not self.lock.closed:
            (self.root / "manifest").write_text(self.sum())
        super().close()


@noticed_by("test_a_cut_read_shows_nothing_of_the_buffer")
class TrustsItsIndex(PlainFiles):
    """Tells the length that was written, whatever could be read."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        self.path(request.key).with_suffix(".length").write_text(str(len(request.frame)))
        return super().write_one(request)

    def read_one(self, request: ReadRequest) -> ReadResult:
        result = super().read_one(request)
        return int(self.path(request.key).with_suffix(".length").read_text()) if isinstance(result, int) else result


@noticed_by(
    "test_bit_flip_while_open_is_a_miss",
    "test_truncated_while_open_is_a_miss",
    "test_swapped_while_open_is_a_miss",
    "test_removed_while_open_is_forgotten",
)
class DeletedIsForEver(PlainFiles):
    """Says yes to a chunk that was deleted once, and does not store it."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.deleted: set[Key] = set()

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        self.deleted.update(key for key in keys if self.path(key).exists())
        return super().delete(keys)

    def write_one(self, request: WriteRequest) -> WriteResult:
        return None if request.key in self.deleted else super().write_one(request)


@noticed_by("test_in_a_stack")
class ForgetsTheEnd(PlainFiles):
    """Drops the end of frames that are longer than it was ever tried with."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return super().write_one(WriteRequest(request.key, request.frame[:30_000]))


# -- room ------------------------------------------------------------------------------------------------------------


@noticed_by("test_refusals_are_per_key")
class RefusesQuietly(PlainFiles):
    """Does not store, and does not say so."""

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        results = super().write(requests)
        return [None if isinstance(result, OutOfSpaceError) else result for result in results[:-1]] + results[-1:]


@noticed_by("test_a_refused_overwrite_does_not_tear")
class CutsBeforeItRefuses(PlainFiles):
    """Makes room for the new frame in the old one's file before it knows whether there is any."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        result = super().write_one(request)
        if isinstance(result, OutOfSpaceError) and self.path(request.key).exists():
            os.truncate(self.path(request.key), 100)
        return result


@noticed_by("test_a_refused_key_is_not_barred")
class BarsForEver(PlainFiles):
    """Never tries again what it could not store once."""

    def __init__(self, context: BackendContext, options: PlainOptions) -> None:
        super().__init__(context, options)
        self.barred: set[Key] = set()

    def write_one(self, request: WriteRequest) -> WriteResult:
        result = OutOfSpaceError("full") if request.key in self.barred else super().write_one(request)
        if result is not None:
            self.barred.add(request.key)
        return result


@noticed_by("test_deleted_bytes_come_back_after_a_restart")
class CountsForEver(PlainFiles):
    """Adds up what was written, over all its starts."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        note = self.root / "written"
        written = int(note.read_text()) if note.exists() else 0
        note.write_text(str(written + len(request.frame)))
        if self.capacity_bytes is not None and written > self.capacity_bytes:
            return OutOfSpaceError("full")
        return super().write_one(request)


@noticed_by("test_the_place_does_not_outgrow_its_capacity")
class HasAWastebasket(PlainFiles):
    """Moves away what is deleted."""

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        for key in keys:
            if self.path(key).exists():
                self.path(key).rename(self.path(key).with_suffix(".deleted"))
        return super().delete(keys)
