"""Lost or damaged logs: frames that are still in the segments are found by reading them, and only those."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, make_namespace

from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key
from tierkv.types.sizes import round_size
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import SlotRef
from tierkv_disk import CAPABILITIES, DiskBackend
from tierkv_disk.recovery.frame_search import WINDOW_PAGES, FrameSearch
from tierkv_disk.recovery.recovery import RecoveryReport

Where = Callable[[Key], tuple[Path, int]]
RAW = 2 * PAGE
FRAME = frame_bytes(RAW)
PAGES = FRAME // PAGE


def sealed(number: int, *, version: int = 1, raw: int = RAW, model: str = "disk-tests") -> bytes:
    """Frame sealed by the framework."""
    slot = bytearray(frame_bytes(raw))
    slot[HEADER_BYTES : HEADER_BYTES + raw] = make_frame(make_key(number), version, raw)
    FrameSealer(make_namespace(model).fingerprint()).seal(memoryview(slot), make_key(number), raw)
    return bytes(slot)


def real(*numbers: int, version: int = 1, raw: int = RAW) -> dict[Key, bytes]:
    """Frame sealed by the framework for each numbered key."""
    return {make_key(number): sealed(number, version=version, raw=raw) for number in numbers}


def recovery_of(session: Session) -> RecoveryReport:
    """Report of the open."""
    assert isinstance(session.backend, DiskBackend)
    return session.backend.recovery


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Change a file behind the tier's back."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each search."""
    searches: list[int] = []
    original = FrameSearch.find_frames

    def find_frames(self: FrameSearch, runs: tuple, excluded: set) -> object:  # type: ignore[type-arg]
        searches.append(sum(run.pages for run in runs))
        return original(self, runs, excluded)

    monkeypatch.setattr(FrameSearch, "find_frames", find_frames)
    return searches


def lose(log: Path) -> None:
    """Remove the file."""
    log.unlink()


def empty(log: Path) -> None:
    """Truncate the file to zero bytes."""
    os.truncate(log, 0)


def overwrite(log: Path) -> None:
    """Overwrite header and records with foreign bytes."""
    log.write_bytes(os.urandom(log.stat().st_size))


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("damage", [lose, empty, overwrite])
def test_without_a_log_every_frame_is_found(
    open_disk: OpenDisk,
    directory: Path,
    damage: Callable[[Path], None],
    direct_io: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames of all lengths in several segments, more than one window: same keys, lengths and bytes; one warning."""
    held = real(*range(300)) | real(*range(300, 400), raw=5 * PAGE) | real(*range(400, 450), raw=PAGE + 1)
    terms = {"frame_bytes_max": 6 * PAGE, "capacity_bytes": 12 << 20, "direct_io": direct_io, "segment_bytes": 5 << 20}
    with open_disk(**terms) as disk:
        disk.put(held)
        before = disk.scan()
    assert len(list(directory.glob("segment-*"))) > 1
    assert (directory / "segment-00000.dat").stat().st_size > WINDOW_PAGES * PAGE
    damage(directory / "index.log")
    with caplog.at_level(logging.WARNING), open_disk(**terms) as disk:
        assert recovery_of(disk).entries_found == 450
        assert disk.scan() == before
        assert disk.read(list(held)) == list(held.values())
    assert caplog.text.count("450 frames were found again") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_disk(**terms) as disk:
        assert recovery_of(disk).lossless, "the frames found were not written to the log"
        assert recovery_of(disk).pages_searched == 0
        assert disk.read(list(held)) == list(held.values())
    assert "found again" not in caplog.text


def test_a_damaged_header_does_not_hide_the_records(open_disk: OpenDisk, directory: Path) -> None:
    """The records are still good: they count, and the search adds to them."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(0, 1, 2))
        disk.put(real(1, version=2))
    write_at(directory / "index.log", 0, b"damage")
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert recovery_of(disk).entries_found == 0
        assert disk.get(make_key(1)) == sealed(1, version=2), "the previous bytes of a known key were taken"
        assert len(disk.scan()) == 3


def test_the_frame_of_a_lost_record_is_found(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The frame of the damaged record is found; frames known to the log keep their pages, and stay newer."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(*range(10)))
    write_at(directory / "index.log", 128 * 4 + 40, b"damage")
    with caplog.at_level(logging.WARNING), open_disk(frame_bytes_max=FRAME) as disk:
        size = round_size(recovery_of(disk).pages_searched * PAGE)
        assert size.endswith(" KiB")
        assert f"searching {size} for frames" in caplog.text, "0 MiB would read like no search"
        assert recovery_of(disk).log.damaged == 1
        assert recovery_of(disk).entries_found == 1
        assert disk.read(list(real(*range(10)))) == list(real(*range(10)).values())
        assert list(disk.scan()) == [make_key(number) for number in (3, 0, 1, 2, 4, 5, 6, 7, 8, 9)]


def test_a_log_that_is_whole_costs_no_search(open_disk: OpenDisk, directory: Path, searched: list[int]) -> None:
    """No search after a close, with segments but no record yet, or with the torn tail of a crash."""
    log = directory / "index.log"
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(*range(10)))
    whole = log.read_bytes()
    open_disk(frame_bytes_max=FRAME).close()
    for cut in (128 * 11, 128 * 6, 128 * 6 + 50, 128):
        log.write_bytes(whole[:cut])
        with open_disk(frame_bytes_max=FRAME) as disk:
            assert len(disk.scan()) == cut // 128 - 1
            assert recovery_of(disk).lossless
    log.write_bytes(whole[: 128 * 6 + 50].ljust(len(whole), b"\0"))
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert len(disk.scan()) == 5
    assert searched == []
    log.unlink()
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert len(disk.scan()) == 10
    assert searched == [(1 << 20) // PAGE - (1 << 20) // PAGE % PAGES], "the counter of searches does not count"


def test_only_what_the_log_does_not_name_is_searched(open_disk: OpenDisk, directory: Path, searched: list[int]) -> None:
    """A damaged record in a full tier must not cost a search of the whole tier."""
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=30 * FRAME) as disk:
        disk.put(real(*range(30)))
    write_at(directory / "index.log", 128 * 4 + 40, b"damage")
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=30 * FRAME) as disk:
        assert len(disk.scan()) == 30
    assert searched == [PAGES]


def test_frames_of_another_namespace_are_not_taken(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """A segment copied from another model's directory holds nothing for this one."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(0))
    with open_disk(frame_bytes_max=FRAME, model="other") as disk:
        disk.put({make_key(number): sealed(number, model="other") for number in range(1, 6)})
    other = place / make_namespace("other").fingerprint().hex()
    shutil.copy(other / "segment-00000.dat", directory / "segment-00001.dat")
    (directory / "index.log").unlink()
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=4 << 20) as disk:
        assert disk.scan() == {make_key(0): FRAME}


def test_a_half_written_frame_is_a_miss(open_disk: OpenDisk, directory: Path, page_of: Where) -> None:
    """The header is valid, the end is not: the frame is found, and its checksum refuses it. Never wrong bytes."""
    capacity = 8 * FRAME
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=capacity) as disk:
        disk.put(real(0, 1))
        path, page = page_of(make_key(1))
    write_at(path, (page + PAGES - 1) * PAGE, bytes(PAGE))
    (directory / "index.log").unlink()
    arena = HostArena(2 * FRAME, RAW)
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=capacity) as disk:
        sealer = FrameSealer(make_namespace().fingerprint())
        tier = Tier("disk", disk.backend, CAPABILITIES, "none", {}, sealer, arena)
        outcomes = tier.perform(Verb.READ, [make_key(0), make_key(1)], [SlotRef(0, 1), SlotRef(1, 1)]).outcomes
        assert [outcome.kind for outcome in outcomes] == [OutcomeKind.OK, OutcomeKind.CORRUPT]
        assert bytes(arena.payload(0)) == make_frame(make_key(0), 1, RAW)


def test_a_frame_whose_end_is_overwritten_is_not_taken(open_disk: OpenDisk, directory: Path) -> None:
    """If another frame begins before this one ends, or the file ends, it cannot be whole."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(*range(10)))
    segment = directory / "segment-00000.dat"
    write_at(segment, FRAME + PAGE, sealed(20, raw=PAGE))
    os.truncate(segment, 10 * FRAME - PAGE)
    (directory / "index.log").unlink()
    with open_disk(frame_bytes_max=FRAME) as disk:
        expected = real(0, *range(2, 9)) | real(20, raw=PAGE)
        assert disk.scan() == {key: len(frame) for key, frame in expected.items()}
        assert disk.read(list(expected)) == list(expected.values())
        assert (recovery_of(disk).entries_found, recovery_of(disk).entries_lost) == (9, 0)


def test_frames_that_could_not_be_stored_are_not_taken(open_disk: OpenDisk, directory: Path) -> None:
    """Frames longer than the buffers would fail at every read, and a longer key has no room in a record."""
    with open_disk(frame_bytes_max=2 * FRAME) as disk:
        disk.put(real(0, 1, 2))
        disk.put(real(3, raw=2 * RAW))
    slot = bytearray(FRAME)
    FrameSealer(make_namespace().fingerprint()).seal(memoryview(slot), bytes(range(1, 106)), RAW)
    write_at(directory / "segment-00000.dat", FRAME, slot)
    (directory / "index.log").unlink()
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert disk.scan() == dict.fromkeys(real(0, 2), FRAME)


def test_a_frame_found_twice_counts_once(open_disk: OpenDisk, directory: Path) -> None:
    """The frame at the higher address counts, and the other one's pages are free."""
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=4 * FRAME) as disk:
        disk.put(real(0, 1, 2, 3))
    write_at(directory / "segment-00000.dat", 2 * FRAME, sealed(0, version=2))
    (directory / "index.log").unlink()
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=4 * FRAME) as disk:
        assert disk.get(make_key(0)) == sealed(0, version=2)
        assert len(disk.scan()) == 3
        disk.put(real(7))
        held = real(1, 3, 7) | real(0, version=2)
        assert disk.read(list(held)) == list(held.values())


def test_deleted_frames_reappear_only_without_a_record(open_disk: OpenDisk, directory: Path) -> None:
    """A surviving record of the deletion counts; without a log the deletion is unknown."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(0, 1, 2, 3))
        disk.forget([make_key(1)])
    write_at(directory / "index.log", 128 * 4 + 40, b"damage")
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert recovery_of(disk).entries_found == 1
        assert disk.contains([make_key(number) for number in range(4)]) == [True, False, True, True]
    (directory / "index.log").unlink()
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert disk.get(make_key(1)) == sealed(1)


def test_more_than_fits_is_dropped(open_disk: OpenDisk, directory: Path) -> None:
    """The current capacity limits recovered frames as well, and the tier works afterwards."""
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=40 * FRAME) as disk:
        disk.put(real(*range(40)))
    (directory / "index.log").unlink()
    capacity = 10 * FRAME
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=capacity) as disk:
        found = disk.scan()
        assert len(found) == 10
        assert sum(path.stat().st_size for path in directory.glob("segment-*")) <= capacity
        assert disk.read(list(found)) == [real(*range(40))[key] for key in found]
        disk.forget(list(found)[:1])
        disk.put(real(50))
        assert sum(path.stat().st_size for path in directory.glob("segment-*")) <= capacity
    with open_disk(frame_bytes_max=FRAME, capacity_bytes=capacity) as disk:
        assert recovery_of(disk).lossless
        assert len(disk.scan()) == 10


def test_quarantined_pages_stay_out_of_service(open_disk: OpenDisk, directory: Path, page_of: Where) -> None:
    """Quarantined pages are not searched, and no frame that claims to extend into them is taken."""
    terms = {"frame_bytes_max": 2 * FRAME, "capacity_bytes": 4 * FRAME}
    with open_disk(**terms) as disk:
        disk.put(real(0, 1, 2, 3))
        path, bad = page_of(make_key(1))
        assert isinstance(disk.backend, DiskBackend)
        disk.backend.quarantine(make_key(1), "stored checksum differs")
        disk.forget([make_key(1)])
    assert bad == PAGES
    write_at(path, 0, sealed(9, raw=2 * RAW)[:FRAME])
    (directory / "index.log").unlink()
    for _ in range(2):
        with open_disk(**terms) as disk:
            assert disk.scan() == dict.fromkeys(real(2, 3), FRAME)
            disk.put(real(4))
            assert page_of(make_key(4)) != (path, bad)
            assert disk.read(list(real(2, 3, 4))) == list(real(2, 3, 4).values())
            disk.forget([make_key(4)])
    assert len((directory / "quarantine.jsonl").read_text().splitlines()) == 1


def test_an_unreadable_page_costs_itself_alone(
    open_disk: OpenDisk, directory: Path, page_of: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lost its log may have lost more: readable frames are found, and the tier opens."""
    with open_disk(frame_bytes_max=FRAME) as disk:
        disk.put(real(*range(20)))
        bad = page_of(make_key(7))[1] * PAGE
    (directory / "index.log").unlink()
    original = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return original(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        disk = open_disk(frame_bytes_max=FRAME)
    assert recovery_of(disk).pages_unreadable == 1
    expected = real(*range(7), *range(8, 20))
    assert disk.scan() == dict.fromkeys(expected, FRAME)
    assert disk.read(list(expected)) == list(expected.values())


def test_frames_found_are_synced_before_their_records(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their writer may have been killed before its sync: the new records would promise more than is durable."""
    with open_disk(frame_bytes_max=FRAME, direct_io="off", durability="none") as disk:
        disk.put(real(0))
    log = directory / "index.log"
    log.unlink()
    synced: list[tuple[str, bool]] = []
    original = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, log.exists()))
        original(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with open_disk(frame_bytes_max=FRAME) as disk:
        assert disk.get(make_key(0)) == sealed(0)
    assert synced[0] == ("segment-00000.dat", False)
