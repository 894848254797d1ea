"""Opening what is there: from the index log and the segment files to the table of stored frames.

A whole log says it all. Where it is missing or damaged, the pages that it does not account for are read, too.
"""

from __future__ import annotations

import logging
import os
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tierkv.types.keys import Key
from tierkv_disk.finding import FrameFinder
from tierkv_disk.index_log import (
    LOG_NAME,
    IndexLog,
    LogHealth,
    LogIdentity,
    Record,
    RecordKind,
    read_records,
    records_of,
)
from tierkv_disk.placement import cuts_for, free_runs, gaps_between, has_room, is_sound, lost_keys, used_runs
from tierkv_disk.places import (
    PAGE_BYTES,
    PAGES_MAX,
    Location,
    Run,
    location_at,
    page_of,
    pages_for,
    pages_in,
    segment_of,
)
from tierkv_disk.quarantine import Quarantine, Suspect
from tierkv_disk.segments import SegmentFiles
from tierkv_disk.table import NOWHERE, Table

COMPACT_RECORDS_MIN = 1024
"""Below this a log is never rewritten for its size."""
logger = logging.getLogger("tierkv_disk")


@dataclass(slots=True)
class Recovery:
    """What an opening found.

    log_missing: there are segment files without a log.
    entries_found: frames that no record named, found by reading pages_searched pages; pages_unreadable of them could
        not be read.
    entries_lost: keys whose segment file is missing or too short, or whose pages a later frame took over.
    entries_dropped: frames that had to go because capacity or directory got a smaller limit.
    rewritten: the log was replaced by a clean one.
    """

    log: LogHealth = field(default_factory=LogHealth)
    log_missing: bool = False
    entries_found: int = 0
    pages_searched: int = 0
    pages_unreadable: int = 0
    entries_lost: int = 0
    entries_dropped: int = 0
    rewritten: bool = False

    @property
    def lossless(self) -> bool:
        """Whether all is as a crash at worst leaves it."""
        return not self.losses()

    @property
    def log_whole(self) -> bool:
        """Whether the log is as a crash at worst leaves it: with a good header, and bad records only at its end."""
        return not self.log_missing and self.log.header_ok and not self.log.damaged

    def losses(self) -> list[str]:
        """What is not as a crash at worst leaves it, in words."""
        told = {
            "index.log is missing": self.log_missing,
            "the header of index.log was damaged": not self.log.header_ok,
            f"{self.log.damaged} records of index.log were damaged": bool(self.log.damaged),
            f"{self.pages_unreadable} pages could not be searched for frames": bool(self.pages_unreadable),
            f"{self.entries_found} frames were found again in the segments": bool(self.pages_searched),
            f"{self.entries_lost} frames are gone with their segment or place": bool(self.entries_lost),
            f"{self.entries_dropped} frames are above the limit, and were dropped": bool(self.entries_dropped),
        }
        return [text for text, happened in told.items() if happened]


class Source(NamedTuple):
    """What is opened: a locked namespace directory. slot_bytes: of format 1, else 0."""

    directory: Path
    identity: LogIdentity
    segments: SegmentFiles
    finder: FrameFinder
    slot_bytes: int = 0


def mostly_dead(records: int, live: int) -> bool:
    """Whether a log is worth rewriting: more than half of it, and not a trifle, speaks of what is no more."""
    return records > COMPACT_RECORDS_MIN and records > 2 * live


def put_records(table: Table) -> Iterator[Record]:
    """The shortest log that says the same."""
    for key in table.entries:
        found = table.find(key)
        if found is not None:
            yield from records_of(key, *found)


def recover(source: Source, quarantine: Quarantine, *, sync: bool) -> tuple[Table, IndexLog, Recovery]:
    """Open log and segments.

    Raises:
        OSError: something cannot be read or written.
    """
    report, table = Recovery(), Table()
    source.segments.open_existing()
    fd = _open(source.directory / LOG_NAME)
    try:
        if fd is not None:
            _replay(fd, source, table, report)
        report.log_missing = fd is None and bool(source.segments.pages)
        if not report.log_whole:
            _find_again(source, table, quarantine, report, set() if fd is None else _deleted(fd, source))
        _settle(source, table, quarantine, report)
        dead = mostly_dead(report.log.records, len(table.entries))
        if fd is not None and report.lossless and not report.log.slotted and not dead:
            log = IndexLog.resume(fd, source.identity, report.log, sync=sync)
            fd = None  # the log's now
            return table, log, report
        report.rewritten = True
        if report.entries_found and sync:
            # Who wrote these pages may have been killed before it synced them; a record is to promise that they stay.
            source.segments.sync(set(source.segments.pages))
        return table, IndexLog.create(source.directory, source.identity, put_records(table), sync=sync), report
    finally:
        if fd is not None:
            os.close(fd)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def _replay(fd: int, source: Source, table: Table, report: Recovery) -> None:
    """What the log says in the end. Written for speed: there are millions of records, nearly all of them first puts."""
    entries, put, part_kind = table.entries, int(RecordKind.PUT), int(RecordKind.PART)
    parts: list[tuple[Key, Run, int]] = []
    for kind, key, part, place, frame_bytes in read_records(fd, source.identity, report.log, source.slot_bytes):
        if kind == put and not part:
            if key in entries:
                del entries[key]
                table.scattered.pop(key, None)
            entries[key] = Location(place << 32 | frame_bytes)  # location_at, without a call
        elif kind == part_kind:
            parts = parts[:part] if part else []
            parts.append((key, Run(place, pages_for(frame_bytes)), frame_bytes))
            continue
        else:
            entries.pop(key, None)
            table.scattered.pop(key, None)
            if kind == put:
                if len(parts) == part and all(each[0] == key for each in parts):
                    table.scattered[key] = (*(run for _, run, _ in parts), Run(place, pages_for(frame_bytes)))
                    entries[key] = location_at(NOWHERE, sum(size for _, _, size in parts) + frame_bytes)
                else:
                    report.entries_lost += 1
        if parts:
            parts = []


def _deleted(fd: int, source: Source) -> set[Key]:
    """Keys of which the last record that is left says that they are gone: their old pages may still look like frames.

    A reading of its own, because a whole log, which is nearly every one, is not to pay for it.
    """
    deleted: set[Key] = set()
    for kind, key, *_ in read_records(fd, source.identity, LogHealth(), source.slot_bytes):
        if kind == RecordKind.DELETE:
            deleted.add(key)
        else:
            deleted.discard(key)
    return deleted


def _find_again(source: Source, table: Table, quarantine: Quarantine, report: Recovery, deleted: set[Key]) -> None:
    """Take in the frames that lie where, as far as the log still tells, nothing does."""
    pages = source.segments.pages
    _forget_lost(table, pages, report)
    used = used_runs(table.entries, table.scattered)
    _still_there(table, quarantine, used, pages)
    free = tuple(free_runs(gaps_between(used), pages))
    report.pages_searched = pages_in(free)
    if not free:
        return
    megabytes = report.pages_searched * PAGE_BYTES >> 20
    logger.warning("%s: index.log is lost or damaged; %d MiB are searched for frames", source.directory, megabytes)
    found = source.finder.find(free, table.entries.keys() | deleted)
    report.entries_found, report.pages_unreadable = len(found), source.finder.pages_unreadable
    # In front, as if older than all that is known: some of them were evicted long ago.
    known = dict(table.entries)
    table.entries.clear()
    table.entries.update(found)
    table.entries.update(known)


def _forget_lost(table: Table, pages: Mapping[int, int], report: Recovery) -> None:
    for key in lost_keys(table.entries, table.scattered, pages):
        report.entries_lost += 1
        _forget(table, key)


def _settle(source: Source, table: Table, quarantine: Quarantine, report: Recovery) -> None:
    """Make the table agree with the files, and find out what is free."""
    entries, scattered, pages = table.entries, table.scattered, source.segments.pages
    used = used_runs(entries, scattered)
    gaps = gaps_between(used)
    if not is_sound(gaps, pages):
        _forget_lost(table, pages, report)
        used = used_runs(entries, scattered)
    kept = _still_there(table, quarantine, used, pages)
    source.segments.pages_out_of_service = sum(suspect.pages for suspect in kept)
    excess = source.segments.excess_pages()
    if excess:
        cuts = cuts_for(excess, entries, used, pages)
        for key in [key for key in entries if _is_beyond(_runs(table, key), cuts)]:
            report.entries_dropped += 1
            _forget(table, key)
        for segment, length in cuts.items():
            source.segments.cut(segment, length)
        used = used_runs(entries, scattered)
        kept = _still_there(table, quarantine, used, pages)
        source.segments.pages_out_of_service = sum(suspect.pages for suspect in kept)
    quarantine.keep(kept)
    for suspect in kept:
        table.out_of_service.add(suspect.runs[0].place)
    if report.entries_lost or excess or kept:
        gaps = gaps_between(used)
    for run in free_runs(gaps, pages):
        table.free.add(run)


def _still_there(table: Table, quarantine: Quarantine, used: list[Location], pages: Mapping[int, int]) -> list[Suspect]:
    """What is listed and neither cut off nor somebody else's. Its pages are added to the used ones."""
    kept = []
    for suspect in quarantine:
        # The bad frame itself may be there still: then its pages are among the used ones already.
        if _runs(table, suspect.key) == suspect.runs:
            kept.append(suspect)
        elif all(has_room(used, run, pages) for run in suspect.runs):
            kept.append(suspect)
            for run in suspect.runs:
                insort(used, location_at(run.place, run.pages * PAGE_BYTES))
    return kept


def _runs(table: Table, key: Key) -> tuple[Run, ...]:
    found = table.find(key)
    return () if found is None else found[0]


def _is_beyond(runs: Iterable[Run], cuts: Mapping[int, int]) -> bool:
    return any(page_of(place) + pages > cuts.get(segment_of(place), PAGES_MAX) for place, pages in runs)


def _forget(table: Table, key: Key) -> None:
    """Before it is known what is free, nothing can become free."""
    del table.entries[key]
    table.scattered.pop(key, None)
