"""The index log: its bytes, its tail, its damage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_support import num_descriptors, run_alone
from hypothesis import given
from hypothesis import strategies as st

from tierkv.testing.frames import make_key
from tierkv.types.keys import Key
from tierkv_disk.extents import address_at
from tierkv_disk.log.index_log import (
    GROW_BYTES,
    KEY_BYTES_MAX,
    RECORD_BYTES,
    IndexLog,
    LogHealth,
    LogIdentity,
    Record,
    RecordKind,
    encode_records,
    has_log_of,
)
from tierkv_disk.log.reading import read_records, used_bytes

GOLDEN = Path(__file__).parent / "golden" / "index-v2.log"
IDENTITY = LogIdentity(bytes(range(16)))
RECORDS = [
    Record(RecordKind.PUT, Key(bytes(range(36))), 0, address_at(0, 0), 2 << 20),
    Record(RecordKind.PUT, Key(b"\xff" * 20), 0, address_at(1, 77), 4096),
    Record(RecordKind.DELETE, Key(bytes(range(36)))),
    Record(RecordKind.PART, Key(b"parts"), 0, address_at(1, 3), 8192),
    Record(RecordKind.PUT, Key(b"parts"), 1, address_at(0, 9), 4096),
    Record(RecordKind.PUT, Key(b"\x00" * KEY_BYTES_MAX), 0, address_at(2**32 - 1, 2**32 - 1), 2**32 - 1),
]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IndexLog]:
    """Empty log."""
    log = IndexLog.create(tmp_path, IDENTITY, [], sync=True)
    yield log
    log.close()


def read(path: Path, identity: LogIdentity = IDENTITY) -> tuple[list[Record], LogHealth]:
    """Records and health as read by the code under test."""
    fd, health = os.open(path, os.O_RDONLY), LogHealth()
    try:
        return [Record(*row) for row in read_records(fd, identity, health)], health
    finally:
        os.close(fd)


def test_a_log_of_slots_is_read_in_pages() -> None:
    """Version 1 counted slots of one size: slot numbers become the numbers of their first pages."""
    fd, health = os.open(GOLDEN.with_name("index-v1.log"), os.O_RDONLY), LogHealth()
    try:
        rows = list(read_records(fd, IDENTITY, health, slot_bytes=2 << 20))
    finally:
        os.close(fd)
    assert [Record(*row) for row in rows[:3]] == [
        Record(RecordKind.PUT, Key(bytes(range(36))), 0, address_at(0, 0), 2 << 20),
        Record(RecordKind.PUT, Key(b"\xff" * 20), 0, address_at(1, 77 * 512), 4096),
        Record(RecordKind.DELETE, Key(bytes(range(36)))),
    ]
    assert health == LogHealth(records=4, slotted=True)


def test_golden_file() -> None:
    """Every later release reads the log of an earlier one: these bytes never change."""
    records, health = read(GOLDEN)
    assert records == RECORDS
    assert health == LogHealth(records=len(RECORDS))


def test_written_bytes_equal_the_golden_file(tmp_path: Path) -> None:
    """This release writes the same bytes, except for the zeros in advance at the end."""
    IndexLog.create(tmp_path, IDENTITY, RECORDS[:2], sync=False).close()
    fd = os.open(tmp_path / "index.log", os.O_RDWR)
    log = IndexLog.resume(fd, IDENTITY, LogHealth(records=2), sync=False)
    log.append(RECORDS[2:])
    log.close()
    golden, written = GOLDEN.read_bytes(), (tmp_path / "index.log").read_bytes()
    assert len(golden) == RECORD_BYTES * (1 + len(RECORDS))
    assert written[: len(golden)] == golden
    assert not any(written[len(golden) :])
    assert len(written) % GROW_BYTES == 0


@given(
    key=st.binary(min_size=1, max_size=KEY_BYTES_MAX),
    numbers=st.tuples(*[st.integers(0, 2**32 - 1)] * 3, st.integers(0, 2**16 - 1)),
    kind=st.sampled_from(RecordKind),
)
def test_any_record_round_trips(key: bytes, numbers: tuple[int, int, int, int], kind: RecordKind) -> None:
    """Includes keys that end in zeros, like the padding."""
    record = Record(kind, Key(key), numbers[3], address_at(numbers[0], numbers[1]), numbers[2])
    fd = os.memfd_create("log")
    try:
        os.pwrite(fd, encode_records((record,), IDENTITY.seed), RECORD_BYTES)
        assert list(read_records(fd, IDENTITY, LogHealth())) == [tuple(record)]
    finally:
        os.close(fd)


def test_tail_torn_at_every_byte(tmp_path: Path, log: IndexLog) -> None:
    """A crash may cut the last append anywhere: the previous records stay, and the next append follows them."""
    log.append(RECORDS)
    whole = (tmp_path / "index.log").read_bytes()[: RECORD_BYTES * (1 + len(RECORDS))]
    torn = tmp_path / "torn.log"
    for cut in range(RECORD_BYTES, len(whole) + 1):
        torn.write_bytes(whole[:cut])
        records, health = read(torn)
        assert records == RECORDS[: cut // RECORD_BYTES - 1]
        assert health.damaged == 0
        assert health.torn_bytes == cut % RECORD_BYTES
        if cut % 19:  # a resume after each cut would take long; 19 and 128 have no common divisor
            continue
        fd = os.open(torn, os.O_RDWR)
        resumed = IndexLog.resume(fd, IDENTITY, health, sync=False)
        resumed.append(RECORDS[:1])
        resumed.close()
        assert read(torn)[0] == [*records, RECORDS[0]]


def test_tail_of_garbage_before_the_zeros(tmp_path: Path, log: IndexLog) -> None:
    """If the file is zero-filled in advance, a torn append is between good records and zeros."""
    log.append(RECORDS[:2])
    path = tmp_path / "index.log"
    os.truncate(path, 8192)
    for cut in range(1, RECORD_BYTES):
        with path.open("r+b") as file:
            file.seek(3 * RECORD_BYTES)
            file.write(encode_records(RECORDS[2:3], IDENTITY.seed)[:cut].ljust(RECORD_BYTES, b"\0"))
        records, health = read(path)
        # A delete of this key ends in zeros, so its last bytes may be missing without a difference.
        assert records in (RECORDS[:2], RECORDS[:3])
        assert health.damaged == 0


@pytest.mark.parametrize("bad", range(4))
def test_a_damaged_record_costs_itself_alone(tmp_path: Path, log: IndexLog, bad: int) -> None:
    """Every flipped byte is detected, and the records after it are still read."""
    records = [Record(RecordKind.PUT, make_key(number), 0, address_at(0, number), 4096) for number in range(5)]
    log.append(records)
    path = tmp_path / "index.log"
    whole = bytearray(path.read_bytes()[:8192])
    for offset in range(RECORD_BYTES * (1 + bad), RECORD_BYTES * (2 + bad)):
        whole[offset] ^= 0x40
        path.write_bytes(whole)
        found, health = read(path)
        assert found == records[:bad] + records[bad + 1 :]
        assert (health.damaged, health.torn_bytes) == (1, 0)
        whole[offset] ^= 0x40


def test_a_lost_page_costs_its_records_alone(tmp_path: Path, log: IndexLog) -> None:
    """A page of zeros in the middle is damage, not the end."""
    records = [Record(RecordKind.PUT, make_key(number), 0, address_at(0, number), 4096) for number in range(100)]
    log.append(records)
    with (tmp_path / "index.log").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    found, health = read(tmp_path / "index.log")
    assert found == records[:31] + records[63:]
    assert health.damaged == 32


def test_records_of_another_namespace_never_pass(tmp_path: Path, log: IndexLog) -> None:
    """A log copied from another namespace is detected by its header and by every record."""
    log.append(RECORDS)
    records, health = read(tmp_path / "index.log", LogIdentity(bytes(range(1, 17))))
    assert records == []
    assert not health.header_ok


def test_growth_keeps_room_for_deletes(tmp_path: Path, log: IndexLog) -> None:
    """The file grows before it is full: a delete must find room on a full disk."""
    path = tmp_path / "index.log"
    batch = [RECORDS[0]] * 512
    for number in range(40):
        log.append(batch)
        assert path.stat().st_size - RECORD_BYTES * (1 + 512 * (number + 1)) >= GROW_BYTES // 2
    assert read(path)[1].records == 40 * 512


FULL_DISK = """
import errno, os, resource, sys
from pathlib import Path
from tierkv_disk.log.index_log import *
from tierkv_disk.extents import address_at
identity = LogIdentity(bytes(range(16)))
log = IndexLog.create(Path(sys.argv[1]), identity, [], sync=True)
limit = (1 << 20) + 5000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
stored = 0
try:
    while True:
        log.append([Record(RecordKind.PUT, b"k" * 36, 0, address_at(0, 0), stored + number) for number in range(100)])
        stored += 100
except OSError as error:
    assert error.errno == errno.EFBIG, error
assert stored > (1 << 20) // 128 - 100, stored
assert not log.broken, log.broken
log.append([Record(RecordKind.DELETE, b"k" * 36)])
print(stored)
"""


def test_full_disk(tmp_path: Path) -> None:
    """An append that does not fit changes nothing, a smaller one still succeeds, and the log is whole."""
    printed = run_alone(FULL_DISK, tmp_path)
    records, health = read(tmp_path / "index.log")
    assert len(records) == int(printed) + 1
    assert [record.frame_bytes for record in records[:-1]] == list(range(int(printed)))
    assert records[-1].kind == RecordKind.DELETE
    assert (health.damaged, health.torn_bytes) == (0, 0)


def test_a_failed_sync_stops_the_log(tmp_path: Path, log: IndexLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the state of the device is unknown: a further record could contradict it."""
    log.append(RECORDS[:1])

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            log.append(RECORDS[1:2])
    with pytest.raises(OSError, match="could not be forced to the device"):
        log.append(RECORDS[1:2])
    assert "Input/output error" in log.broken


def test_replacing_is_all_or_nothing(tmp_path: Path, log: IndexLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that fails half-way keeps the old log, no temporary file and no descriptor: there are many tries."""
    log.append(RECORDS)
    descriptors = num_descriptors()
    before = (tmp_path / "index.log").read_bytes()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            IndexLog.create(tmp_path, IDENTITY, RECORDS[:1], sync=True)
    assert [path.name for path in tmp_path.iterdir()] == ["index.log"]
    assert (tmp_path / "index.log").read_bytes() == before
    assert num_descriptors() == descriptors


@pytest.mark.usefixtures("log")
def test_a_look_for_a_log_keeps_no_descriptor(tmp_path: Path) -> None:
    """A tier that cannot be opened is tried again for days: one descriptor for each try would use up all of them."""
    descriptors = num_descriptors()
    assert has_log_of(tmp_path, IDENTITY)
    assert not has_log_of(tmp_path, LogIdentity(bytes(16)))
    assert not has_log_of(tmp_path / "missing", IDENTITY)
    assert num_descriptors() == descriptors


def test_a_replacement_that_may_not_last_stops_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new log exists, but its name is not durable: records added now could be lost with it in a power cut."""

    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("tierkv_disk.log.index_log.sync_directory", fail)
    log = IndexLog.create(tmp_path, IDENTITY, RECORDS[:1], sync=True)
    with pytest.raises(OSError, match=r"could not be replaced: .*Input/output error"):
        log.append(RECORDS[1:2])
    log.close()
    assert read(tmp_path / "index.log")[0] == RECORDS[:1]


@pytest.mark.parametrize("zeros", [0, 1, 65535, 65536, 65537, 200_000])
@pytest.mark.parametrize("used", [0, 1, 65535, 65536, 65537, 200_000])
def test_zeros_at_the_end_are_told_from_data(used: int, zeros: int) -> None:
    """A record that is taken for a part of the zeros would be lost."""
    data = bytes(used - 1) + b"\1" if used else b""
    assert used_bytes(data + bytes(zeros)) == used
