"""Reading of the log by column: it must find what reading record by record finds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tierkv.types.keys import Key
from tierkv_disk.extents import PAGE_BYTES, Extent, PageAddress, Run, address_at, extent_at, pages_for
from tierkv_disk.log.index_log import (
    PUT_KIND,
    RANKED_KEY_BYTES_MAX,
    RECORD_BYTES,
    IndexLog,
    LogIdentity,
    Record,
    RecordKind,
    Row,
    records_of,
)
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


def replayed(path: Path) -> tuple[Table, RecoveryReport]:
    """Table of a log, and the report."""
    fd, table, report = os.open(path, os.O_RDONLY), Table(), RecoveryReport()
    try:
        replay(fd, IDENTITY, 0, table, report)
    finally:
        os.close(fd)
    return table, report


def end_of_records(path: Path, records: int) -> None:
    """Cut off the zeros that are written ahead, so that whole reads consist of records."""
    os.truncate(path, RECORD_BYTES * (1 + records))


def test_the_last_record_of_a_key_counts_and_sets_its_age(tmp_path: Path, rng: random.Random) -> None:
    """A chunk that was written again is young: were it to keep its old place, it would be evicted first."""
    records: list[Row] = [put(rng.randrange(60), page, rank=page) for page in range(200)]
    path = written(tmp_path, records)
    end_of_records(path, len(records))
    table, report = replayed(path)
    expected: dict[Key, Extent] = {}
    for _, key, _, address, size, rank in records:
        expected.pop(key, None)
        expected[key] = extent_at(address, size, rank)
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
    table, report = replayed(path)
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
    table, _ = replayed(path)
    assert not table.scattered
    assert table.find_frame(put(1, 50).key) == ((Run(put(1, 50).address, 2),), 8191)
    assert list(table.entries)[-2:] == [put(1, 50).key, put(10**6, 51).key]


def test_zeros_behind_the_records_are_not_looked_at_one_by_one(tmp_path: Path) -> None:
    """Every log ends with up to a megabyte of them: they took most of the time of opening a small tier."""
    records = [put(number, number) for number in range(300)]
    path = written(tmp_path, records)
    table, report = replayed(path)
    assert path.stat().st_size > 8000 * RECORD_BYTES
    assert (len(table.entries), report.log.records, report.log.damaged, report.log.torn_bytes) == (300, 300, 0, 0)
    with path.open("r+b") as file:  # a record behind lost ones: they are damage then, also as zeros
        file.seek(RECORD_BYTES * 400)
        file.write(path.read_bytes()[RECORD_BYTES : 2 * RECORD_BYTES])
    _, report = replayed(path)
    assert (report.log.records, report.log.damaged) == (301, 99)


def random_records(rng: random.Random, keys: list[Key]) -> list[Row]:
    """Puts, deletes and frames in several runs, some of which lack a record: more than one read of them."""
    records: list[Row] = []
    while len(records) < 40_000:
        key = rng.choice(keys)
        rank = rng.randrange(1 << 64) if len(key) <= RANKED_KEY_BYTES_MAX else 0
        match rng.randrange(4):
            case 0:
                records.append(Record(RecordKind.DELETE, key))
            case 1:
                runs = [
                    Run(address_at(rng.randrange(9), rng.randrange(1 << 32)), 1) for _ in range(rng.randrange(2, 5))
                ]
                rows = [*records_of(key, runs, PAGE_BYTES * len(runs), rank)]
                records += rng.choice((rows, rows, rows[:-1], rows[1:]))
            case _:
                sizes = [rng.randrange(1, 1 << 32) for _ in range(rng.randrange(1, 9))]
                records += [Record(PUT_KIND, key, 0, address_at(3, size % 999), size, rank) for size in sizes]
    return records


def one_by_one(records: list[Row]) -> dict[Key, tuple[list[tuple[int, int]], int]]:
    """Runs, as address and bytes, and rank of each frame that these records leave."""
    frames: dict[Key, tuple[list[tuple[int, int]], int]] = {}
    parts: list[tuple[Key, int, int]] = []
    for kind, key, part, address, size, rank in records:
        if kind == RecordKind.PART:
            parts = [*parts[:part], (key, address, size)]
            continue
        frames.pop(key, None)
        before = parts if part else []
        if kind == PUT_KIND and len(before) == part and {each[0] for each in before} <= {key}:
            frames[key] = ([*((at, length) for _, at, length in before), (address, size)], rank)
        parts = []
    return frames


def test_random_records_are_read_as_one_by_one(tmp_path: Path, rng: random.Random) -> None:
    """Deletes and parts cut the columns anywhere, keys have any length, and bad records are between good ones."""
    keys = [Key(rng.randbytes(rng.choice((1, 33, 36, 36, 36, 36, 96, 97, 104)))) for _ in range(400)]
    records = random_records(rng, keys)
    path = written(tmp_path, records)
    bad = set(rng.sample(range(len(records) - 1), 50))
    data = bytearray(path.read_bytes())
    for number in bad:
        data[RECORD_BYTES * (1 + number) + rng.randrange(RECORD_BYTES)] ^= 0x10
    path.write_bytes(data)
    table, report = replayed(path)
    expected = one_by_one([record for number, record in enumerate(records) if number not in bad])
    assert list(table.entries) == list(expected)
    for key, (parts, rank) in expected.items():
        runs = tuple(Run(PageAddress(address), pages_for(size)) for address, size in parts)
        assert table.find_frame(key) == (runs, sum(size for _, size in parts))
        assert table.rank(key) == rank
    assert (report.log.records, report.log.damaged) == (len(records) - len(bad), len(bad))
    assert set(table.scattered) == {key for key, (parts, _) in expected.items() if len(parts) > 1}


def test_a_frame_of_four_gigabytes_is_no_frame(tmp_path: Path) -> None:
    """No writer makes such a record, and its length has no place in a table: the open must not fail for it."""
    key, half = put(1, 0).key, 1 << 31
    records: list[Row] = [
        Record(RecordKind.PART, key, 0, address_at(0, 8), half),
        Record(RecordKind.PUT, key, 1, address_at(0, 8 + half // PAGE_BYTES), half),
        put(2, 3),
    ]
    table, report = replayed(written(tmp_path, records))
    assert list(table.entries) == [put(2, 3).key]
    assert report.entries_lost == 1
