"""Recovery of a namespace: from the index log and the segment files to the table of stored frames.

An undamaged log is sufficient. If it is missing or damaged, the pages that it does not account for are read as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tierkv.abc.logs import plugin_logger
from tierkv.types.keys import Key
from tierkv.types.sizes import round_size
from tierkv_disk.directory.files import NotOurFileError, open_file, set_aside
from tierkv_disk.directory.layout import LOG_NAME
from tierkv_disk.extents import (
    FRAME_BYTES_LIMIT,
    PAGE_BYTES,
    PAGES_MAX,
    Extent,
    Run,
    extent_at,
    page_of,
    pages_for,
    pages_in,
    read_extent,
    segment_of,
)
from tierkv_disk.log.index_log import (
    IndexLog,
    LogHealth,
    LogIdentity,
    RecordKind,
    Row,
    is_overlong,
    records_of,
    replacement_bytes,
    spare_bytes,
)
from tierkv_disk.log.reading import read_batches, read_records
from tierkv_disk.recovery.claims import (
    UsedRuns,
    cuts_for,
    free_runs,
    gaps_between,
    has_room,
    is_sound,
    lost_keys,
    used_runs,
)
from tierkv_disk.recovery.frame_search import FrameSearch
from tierkv_disk.segments.segment_files import SegmentFiles
from tierkv_disk.space.quarantine import Quarantine, QuarantineEntry
from tierkv_disk.space.table import SCATTERED, Table

COMPACT_RECORDS_MIN = 4096
"""A log with fewer records is never rewritten for its size."""
logger = plugin_logger("tierkv_disk")


@dataclass(slots=True)
class RecoveryReport:
    """Result of recovering a namespace."""

    log: LogHealth = field(default_factory=LogHealth)
    log_missing: bool = False
    """Whether there are segment files without a log."""
    entries_found: int = 0
    """Frames that no record names, found by searching pages."""
    pages_searched: int = 0
    pages_unreadable: int = 0
    """Searched pages that the device could not read."""
    entries_lost: int = 0
    """Keys whose segment is missing or too short, or whose pages belong to a later frame."""
    entries_dropped: int = 0
    """Frames removed because the capacity or the directory has a smaller limit now."""
    rewritten: bool = False
    """Whether the log was replaced by a compact one."""

    @property
    def lossless(self) -> bool:
        """Whether a crash alone explains the state of the files."""
        return not self.losses()

    @property
    def log_whole(self) -> bool:
        """Whether a crash alone explains the state of the log: its header is good, and only its end is damaged."""
        return not self.log_missing and self.log.header_ok and not self.log.damaged

    def losses(self) -> list[str]:
        """Messages on everything that a crash alone does not explain."""
        messages = {
            "index.log is missing": self.log_missing,
            "the header of index.log was damaged": not self.log.header_ok,
            f"{self.log.damaged} records of index.log were damaged": bool(self.log.damaged),
            f"{self.pages_unreadable} pages could not be searched for frames": bool(self.pages_unreadable),
            f"{self.entries_found} frames were found again in the segments": bool(self.pages_searched),
            f"{self.entries_lost} frames were lost with their segment or pages": bool(self.entries_lost),
            f"{self.entries_dropped} frames exceeded the limit and were dropped": bool(self.entries_dropped),
        }
        return [text for text, happened in messages.items() if happened]


class NamespaceFiles(NamedTuple):
    """Files of a locked namespace directory."""

    directory: Path
    identity: LogIdentity
    segments: SegmentFiles
    search: FrameSearch
    slot_bytes: int = 0
    """Slot size of a namespace of format 1; 0 for the current format."""


def is_mostly_dead(records: int, live: int) -> bool:
    """Whether a log should be rewritten: it is not short, and more than half of its records are obsolete."""
    return records > COMPACT_RECORDS_MIN and records > 2 * live


def log_reserve(log_bytes: int, live: int) -> int:
    """Bytes to keep free beside a log of ``log_bytes`` bytes and ``live`` live records, so that it can be rewritten."""
    return spare_bytes(log_bytes, max(COMPACT_RECORDS_MIN, 2 * live), live)


def records_of_table(table: Table) -> Iterator[Row]:
    """Records of the shortest log that yields this table."""
    put = int(RecordKind.PUT)
    for key, extent in table.entries.items():
        address, frame_bytes, rank = read_extent(extent)
        if address != SCATTERED:
            yield put, key, 0, address, frame_bytes, rank
        else:
            yield from records_of(key, table.scattered[key], frame_bytes, rank)


def recover(files: NamespaceFiles, quarantine: Quarantine, *, sync: bool) -> tuple[Table, IndexLog, RecoveryReport]:
    """Open log and segments.

    Raises:
        OSError: a file cannot be read or written.
    """
    report, table = RecoveryReport(), Table()
    files.segments.open_existing()
    fd = _open(files.directory / LOG_NAME)
    try:
        if fd is not None:
            replay(fd, files.identity, files.slot_bytes, table, report)
        report.log_missing = fd is None and bool(files.segments.pages)
        if not report.log_whole:
            _search(files, table, quarantine, report, set() if fd is None else _deleted(fd, files))
        _settle(files, table, quarantine, report)
        dead = is_mostly_dead(report.log.records, len(table.entries))
        overlong = fd is not None and is_overlong(os.fstat(fd).st_size, report.log.records)
        if fd is not None and report.lossless and not report.log.slotted and not dead and not overlong:
            log = IndexLog.resume(fd, files.identity, report.log, sync=sync)
            fd = None  # the log owns it now
            return table, log, report
        report.rewritten = True
        if report.entries_found and sync:
            # The writer of these pages may have been killed before it synced them, and a record promises durability.
            files.segments.sync(set(files.segments.pages))
        return table, IndexLog.create(files.directory, files.identity, records_of_table(table), sync=sync), report
    finally:
        if fd is not None:
            os.close(fd)


def _open(path: Path) -> int | None:
    try:
        return open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except NotOurFileError as error:
        set_aside(path, error.strerror)
        return None


def replay(fd: int, identity: LogIdentity, slot_bytes: int, table: Table, report: RecoveryReport) -> None:
    """Fill the table from the log. Written for speed: there are millions of records, nearly all of them first puts.

    Args:
        fd: descriptor of the log.
        identity: expected namespace.
        slot_bytes: slot size of a namespace of format 1; 0 for the current format.
        table: an empty one, filled in.
        report: filled in.

    Raises:
        OSError: the log cannot be read.
    """
    parts: list[tuple[Key, Run, int]] = []
    for records in read_batches(fd, identity, report.log, slot_bytes):
        for begin, end, is_whole in records.stretches():
            if is_whole:
                parts.clear()
                _replay_puts(records.keys[begin:end], records.extents[begin:end], table)
            else:
                _replay_rows(records.rows(begin, end), table, report, parts)


def _replay_puts(keys: Sequence[Key], extents: Sequence[Extent], table: Table) -> None:
    """Fill the table from records of frames in one run."""
    before = len(table.entries)
    table.entries.update(zip(keys, extents, strict=True))
    if len(table.entries) - before < len(keys):  # some keys were known: their last records count
        for key in keys:
            table.entries[key] = table.entries.pop(key)
            table.scattered.pop(key, None)


def _replay_rows(rows: Iterable[Row], table: Table, report: RecoveryReport, parts: list[tuple[Key, Run, int]]) -> None:
    """Fill the table from other records. parts: those of a frame whose last record is still to come."""
    entries, put, part_kind = table.entries, int(RecordKind.PUT), int(RecordKind.PART)
    for kind, key, part, address, frame_bytes, rank in rows:
        if kind == part_kind:
            del parts[part:]
            parts.append((key, Run(address, pages_for(frame_bytes)), frame_bytes))
            continue
        entries.pop(key, None)
        table.scattered.pop(key, None)
        if kind == put:
            size = sum(size for _, _, size in parts) + frame_bytes
            if len(parts) == part and all(each[0] == key for each in parts) and size < FRAME_BYTES_LIMIT:
                table.scattered[key] = (*(run for _, run, _ in parts), Run(address, pages_for(frame_bytes)))
                entries[key] = extent_at(SCATTERED, size, rank)
            else:
                report.entries_lost += 1
        if parts:
            parts.clear()


def _deleted(fd: int, files: NamespaceFiles) -> set[Key]:
    """Keys whose last remaining record is a delete: their previous pages may still look like frames.

    This reads the log a second time, so that an undamaged log, by far the usual case, costs nothing more.
    """
    deleted: set[Key] = set()
    for kind, key, *_ in read_records(fd, files.identity, LogHealth(), files.slot_bytes):
        if kind == RecordKind.DELETE:
            deleted.add(key)
        else:
            deleted.discard(key)
    return deleted


def _search(
    files: NamespaceFiles, table: Table, quarantine: Quarantine, report: RecoveryReport, deleted: set[Key]
) -> None:
    """Add the frames found in pages that the rest of the log does not account for."""
    pages = files.segments.pages
    _forget_lost(table, pages, report)
    used, _ = _with_quarantined(table, quarantine, used_runs(table.entries, table.scattered), pages)
    free = tuple(free_runs(gaps_between(used), pages))
    report.pages_searched = pages_in(free)
    if not free:
        return
    searched = round_size(report.pages_searched * PAGE_BYTES)
    logger.warning("%s: index.log is lost or damaged; searching %s for frames", files.directory, searched)
    found = files.search.find_frames(free, table.entries.keys() | deleted)
    report.entries_found, report.pages_unreadable = len(found), files.search.pages_unreadable
    # They go in front, as older than all known entries: some of them were evicted long ago.
    known = dict(table.entries)
    table.entries.clear()
    table.entries.update(found)
    table.entries.update(known)


def _forget_lost(table: Table, pages: Mapping[int, int], report: RecoveryReport) -> None:
    for key in lost_keys(table.entries, table.scattered, pages):
        report.entries_lost += 1
        _forget(table, key)


def _settle(files: NamespaceFiles, table: Table, quarantine: Quarantine, report: RecoveryReport) -> None:
    """Make the table agree with the files and the limits, and derive the free runs."""
    entries, scattered, segments = table.entries, table.scattered, files.segments
    pages = segments.pages
    used = used_runs(entries, scattered)
    if not is_sound(used, pages):
        _forget_lost(table, pages, report)
        used = used_runs(entries, scattered)
    used, kept = _with_quarantined(table, quarantine, used, pages)
    segments.set_pages_out_of_service(sum(entry.pages for entry in kept))
    excess = segments.excess_pages(replacement_bytes(len(entries)))
    if excess:
        cuts = cuts_for(excess, entries, used, pages)
        for key in [key for key in entries if _is_beyond(_runs(table, key), cuts)]:
            report.entries_dropped += 1
            _forget(table, key)
        for segment, length in cuts.items():
            segments.cut_segment(segment, length)
        used, kept = _with_quarantined(table, quarantine, used_runs(entries, scattered), pages)
        segments.set_pages_out_of_service(sum(entry.pages for entry in kept))
    quarantine.keep_only(kept)
    for entry in kept:
        table.take_out_of_service(entry.runs[0].address)
    for run in free_runs(gaps_between(used), pages):
        table.add_free(run)


def _with_quarantined(
    table: Table, quarantine: Quarantine, used: UsedRuns, pages: Mapping[int, int]
) -> tuple[UsedRuns, list[QuarantineEntry]]:
    """Add the pages of quarantine entries that are neither cut off nor used by another frame; and those entries."""
    valid, apart = [], used_runs({}, {})
    for entry in quarantine:
        # The bad frame itself may still be stored: then its pages are already among the used ones.
        if _runs(table, entry.key) == entry.runs:
            valid.append(entry)
        elif all(has_room(used, run, pages) and has_room(apart, run, pages) for run in entry.runs):
            valid.append(entry)
            apart = apart.with_runs(entry.runs)
    return used.with_runs(map(Run, apart.starts.tolist(), apart.pages.tolist())), valid


def _runs(table: Table, key: Key) -> tuple[Run, ...]:
    found = table.find_frame(key)
    return () if found is None else found[0]


def _is_beyond(runs: Iterable[Run], cuts: Mapping[int, int]) -> bool:
    return any(page_of(address) + pages > cuts.get(segment_of(address), PAGES_MAX) for address, pages in runs)


def _forget(table: Table, key: Key) -> None:
    # Not drop_frame: no page may become free before all free runs are derived.
    del table.entries[key]
    table.scattered.pop(key, None)
