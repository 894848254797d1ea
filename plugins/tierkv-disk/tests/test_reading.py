"""Reading of the log by column, which an open of a usual tier uses: it must find what reading row by row finds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tierkv.types.keys import Key
from tierkv_disk.extents import Run, address_at, with_rank
from tierkv_disk.extents import extent_at as extent
from tierkv_disk.log.index_log import RECORD_BYTES, IndexLog, LogIdentity, Record, RecordKind, Row
from tierkv_disk.log.reading import Puts, read_batches
from tierkv_disk.recovery.recovery import RecoveryReport, replay
from tierkv_disk.space.table import Table

IDENTITY = LogIdentity(bytes(range(16)))
RANKED = 7 << 32 | 3


def put(number: int, page: int, rank: int = RANKED) -> Record:
    """Record of a frame of two pages less a byte."""
    return Record(RecordKind.PUT, Key(number.to_bytes(36, "big")), 0, address_at(page % 3, 2 * page), 8191, rank)


def written(folder: Path, records: list[Row]) -> Path:
    """Path of a log with these records."""
    IndexLog.create(folder, IDENTITY, records, sync=False).close()
    return folder / "index.log"


def replayed(path: Path) -> tuple[Table, RecoveryReport, list[bool]]:
    """Table of a log, the report, and for each batch whether it was read by column."""
    fd, table, report = os.open(path, os.O_RDONLY), Table(), RecoveryReport()
    try:
        by_column = [isinstance(batch, Puts) for batch in read_batches(fd, IDENTITY, RecoveryReport().log)]
        replay(fd, IDENTITY, 0, table, report)
    finally:
        os.close(fd)
    return table, report, by_column


def end_of_records(path: Path, records: int) -> None:
    """Cut off the zeros that are written ahead, so that whole reads consist of records."""
    os.truncate(path, RECORD_BYTES * (1 + records))


def test_the_last_record_of_a_key_counts_and_sets_its_age(tmp_path: Path, rng: random.Random) -> None:
    """A chunk that was written again is young: were it to keep its old place, it would be evicted first."""
    records: list[Row] = [put(rng.randrange(60), page, rank=page) for page in range(200)]
    path = written(tmp_path, records)
    end_of_records(path, len(records))
    table, report, by_column = replayed(path)
    expected: dict[Key, int] = {}
    for _, key, _, address, size, rank in records:
        expected.pop(key, None)
        expected[key] = with_rank(extent(address, size), rank)
    assert by_column == [True]
    assert list(table.entries.items()) == list(expected.items())
    assert report.log.records == 200


@pytest.mark.parametrize("offset", [0, 8, 12, 20, 24, 120])
def test_a_damaged_record_among_usual_ones_is_left_out(tmp_path: Path, offset: int) -> None:
    """The checksum covers each field: a changed address would show the bytes of another chunk as free pages."""
    records: list[Row] = [put(number, number) for number in range(50)]
    path = written(tmp_path, records)
    end_of_records(path, len(records))
    data = bytearray(path.read_bytes())
    data[RECORD_BYTES * 21 + offset] ^= 0x01
    path.write_bytes(data)
    table, report, by_column = replayed(path)
    assert by_column == [False]
    assert set(table.entries) == {record[1] for number, record in enumerate(records) if number != 20}
    assert (report.log.records, report.log.damaged) == (49, 1)


def test_a_frame_in_several_runs_that_is_written_again_is_in_one(tmp_path: Path) -> None:
    """Its old runs would otherwise stay used, and a read would gather pages of other chunks."""
    parts: list[Row] = [
        Record(RecordKind.PART, put(1, 0).key, 0, address_at(0, 8), 4096),
        Record(RecordKind.PUT, put(1, 0).key, 1, address_at(0, 20), 4096, RANKED),
    ]
    # Two reads of the log: the parts are in the first one, and the second one has puts alone.
    first = parts + [put(number, 100 + number) for number in range(2, (4 << 20) // RECORD_BYTES)]
    again: list[Row] = [put(1, 50), put(10**6, 51)]
    path = written(tmp_path, first + again)
    end_of_records(path, len(first) + len(again))
    table, _, by_column = replayed(path)
    assert by_column == [False, True]
    assert not table.scattered
    assert table.find_frame(put(1, 50).key) == ((Run(put(1, 50).address, 2),), 8191)
    assert list(table.entries)[-2:] == [put(1, 50).key, put(10**6, 51).key]


def test_zeros_behind_the_records_are_not_looked_at_one_by_one(tmp_path: Path) -> None:
    """Every log ends with up to a megabyte of them: they took most of the time of opening a small tier."""
    records = [put(number, number) for number in range(300)]
    path = written(tmp_path, records)
    table, report, by_column = replayed(path)
    assert path.stat().st_size > 8000 * RECORD_BYTES
    assert by_column == [True]
    assert (len(table.entries), report.log.records, report.log.damaged, report.log.torn_bytes) == (300, 300, 0, 0)
    with path.open("r+b") as file:  # a record behind lost ones: they are damage then, also as zeros
        file.seek(RECORD_BYTES * 400)
        file.write(path.read_bytes()[RECORD_BYTES : 2 * RECORD_BYTES])
    _, report, _ = replayed(path)
    assert (report.log.records, report.log.damaged) == (301, 99)
