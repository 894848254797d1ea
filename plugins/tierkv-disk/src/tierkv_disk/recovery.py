"""Opening what is there: from the index log and the segment files to the table of stored frames."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.types.keys import Key
from tierkv_disk.index_log import LOG_NAME, IndexLog, LogHealth, LogIdentity, Record, RecordKind, read_records
from tierkv_disk.segments import SegmentFiles
from tierkv_disk.slots import (
    Location,
    Slot,
    SlotTable,
    frame_bytes_of,
    location_at,
    number_of,
    segment_of,
    slot_of,
)

COMPACT_RECORDS_MIN = 1024
"""Below this a log is never rewritten for its size."""


Entries = dict[Key, Location]
"""Everything stored, in the order in which it was written."""


@dataclass(slots=True)
class Recovery:
    """What an opening found.

    log_missing: there are segment files without a log; nothing in them can be found again.
    entries_lost: keys whose segment file is missing or too short, or whose slot a later frame took over.
    rewritten: the log was replaced by a clean one.
    """

    log: LogHealth = field(default_factory=LogHealth)
    log_missing: bool = False
    entries_lost: int = 0
    rewritten: bool = False

    @property
    def lossless(self) -> bool:
        """Whether all is as a crash at worst leaves it."""
        return not self.losses()

    def losses(self) -> list[str]:
        """What is not as a crash at worst leaves it, in words."""
        told = {
            "index.log is missing, what the segments held cannot be found again": self.log_missing,
            "the header of index.log was damaged": not self.log.header_ok,
            f"{self.log.damaged} records of index.log were damaged": bool(self.log.damaged),
            f"{self.entries_lost} frames are gone with their segment or slot": bool(self.entries_lost),
        }
        return [text for text, happened in told.items() if happened]


def mostly_dead(records: int, live: int) -> bool:
    """Whether a log is worth rewriting: more than half of it, and not a trifle, speaks of what is no more."""
    return records > COMPACT_RECORDS_MIN and records > 2 * live


def put_records(entries: Entries) -> Iterator[Record]:
    """The shortest log that says the same."""
    return (Record(RecordKind.PUT, key, slot_of(at), frame_bytes_of(at)) for key, at in entries.items())


def recover(
    directory: Path, identity: LogIdentity, segments: SegmentFiles, *, sync: bool
) -> tuple[Entries, SlotTable, IndexLog, Recovery]:
    """Open log and segments of a locked namespace directory.

    Raises:
        OSError: something cannot be read or written.
    """
    report = Recovery()
    slots_of = segments.open_existing()
    try:
        fd = os.open(directory / LOG_NAME, os.O_RDWR)
    except FileNotFoundError:
        report.log_missing = bool(slots_of)
        log = IndexLog.create(directory, identity, [], sync=sync)
        return {}, _slot_table(segments, {}), log, report
    try:
        entries, owners = _replay(fd, identity, report)
        lost = [slot for slot in owners if number_of(slot) >= slots_of.get(segment_of(slot), 0)]
        for slot in lost:
            del entries[owners.pop(slot)]
        report.entries_lost += len(lost)
        if report.lossless and not mostly_dead(report.log.records, len(entries)):
            return entries, _slot_table(segments, owners), IndexLog.resume(fd, identity, report.log, sync=sync), report
        report.rewritten = True
        log = IndexLog.create(directory, identity, put_records(entries), sync=sync)
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return entries, _slot_table(segments, owners), log, report


def _replay(fd: int, identity: LogIdentity, report: Recovery) -> tuple[Entries, dict[Slot, Key]]:
    """What the log says in the end, by key and by slot.

    A slot belongs to the last record that names it: an older claim can only stand there because the record that ended
    it was lost.
    """
    entries: Entries = {}
    owners: dict[Slot, Key] = {}
    for kind, key, slot, frame_bytes in read_records(fd, identity, report.log):
        old = entries.pop(key, None)
        if old is not None:
            del owners[slot_of(old)]
        if kind is not RecordKind.PUT:
            continue
        owner = owners.setdefault(slot, key)
        if owner is not key:
            del entries[owner]
            owners[slot] = key
            report.entries_lost += 1
        entries[key] = location_at(slot, frame_bytes)
    return entries, owners


def _slot_table(segments: SegmentFiles, used: Container[Slot]) -> SlotTable:
    table = SlotTable()
    for segment, covered in segments.shrink(used).items():
        table.add_segment(segment, covered, used)
    return table
