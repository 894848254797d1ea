"""Copies: only whole chunks, into places that may hold them; full targets, damage, chunks that vanish."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import FRAME_BYTES, chunk_key, fill, flip_byte, model_namespace, place_at, sealed_frame

from tierkv.abc import StoredFrame, WriteRequest
from tierkv.errors import BackendError, OutOfSpaceError, TierKVError
from tierkv.frames.frame import HEADER_BYTES, pack_header, parse_header
from tierkv.stores.copying import Copied, StoreCopy, is_same_place
from tierkv.stores.findings import Finding, FindingKind
from tierkv.stores.folder import read_manifest
from tierkv.stores.places import Place, folder_place
from tierkv.stores.store import Store

NAMESPACE = model_namespace()


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    """A disk with twenty chunks."""
    place = place_at(tmp_path / "disk", "disk")
    fill(place, NAMESPACE, range(20))
    return place


def copied(source: Place, target: Place, **options: bool) -> tuple[Copied, list[Finding]]:
    """Copy all chunks; returns sums and findings."""
    sums = Copied()
    with Store(source, NAMESPACE, writes=False) as one, Store(target, NAMESPACE, writes=True) as two:
        return sums, list(StoreCopy(one, two, target, sums, **options).run())


def test_a_damaged_chunk_is_named_and_not_copied(disk: Place, tmp_path: Path) -> None:
    """A copy that carried damage along would be no backup."""
    segment = next((tmp_path / "disk").glob("*/segment-*.dat"))
    flip_byte(segment, bytes(sealed_frame(NAMESPACE, 7)[:HEADER_BYTES]), HEADER_BYTES + 100)
    folder = folder_place(str(tmp_path / "folder"))
    sums, findings = copied(disk, folder)
    assert [(finding.kind, finding.subject) for finding in findings] == [(FindingKind.DAMAGED, chunk_key(7).hex())]
    assert (sums.chunks, sums.findings) == (19, 1)
    assert [exported.chunks for exported in read_manifest(tmp_path / "folder")] == [None], "no complete export"


def test_a_full_target_ends_the_copy_which_continues_later(disk: Place, tmp_path: Path) -> None:
    """A disk fills up in the middle of a move: what is there stays, and the second try copies the rest."""
    small = replace(place_at(tmp_path / "small", "disk"), capacity_bytes=8 * FRAME_BYTES)
    sums, findings = copied(disk, small)
    assert sums.is_full
    assert 0 < sums.chunks <= 8
    assert [finding.kind for finding in findings] == [FindingKind.INCOMPLETE]
    assert "is full" in findings[0].reason
    large = replace(small, capacity_bytes=64 << 20)
    again, findings = copied(disk, large)
    assert (findings, again.present, again.chunks) == ([], sums.chunks, 20 - sums.chunks)


def test_a_file_system_without_room_is_named(disk: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in an export folder is a full target, not a failure of every chunk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = folder_place(str(tmp_path / "folder"))
    with Store(disk, NAMESPACE, writes=False) as one, Store(folder, NAMESPACE, writes=True) as two:
        monkeypatch.setattr("os.fdatasync", full)
        sums = Copied()
        findings = list(StoreCopy(one, two, folder, sums).run())
    assert sums.is_full
    assert [finding.kind for finding in findings] == [FindingKind.INCOMPLETE]
    assert "No space left" in findings[0].reason
    assert not list((tmp_path / "folder").rglob("*.tmp"))


def test_one_finding_tells_of_a_full_target(disk: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB cannot sync the other chunks of a call without room: 30 such lines hid the one that says what to do."""
    target = place_at(tmp_path / "lmdb", "lmdb")
    write = Store.write

    def full(store: Store, requests: Sequence[WriteRequest]) -> list[TierKVError | None]:
        wrong = [BackendError("a sync failed meanwhile"), OutOfSpaceError("No space left on device")]
        return [*write(store, requests[:-2]), *wrong]

    monkeypatch.setattr(Store, "write", full)
    sums, findings = copied(disk, target)
    assert (sums.chunks, [finding.kind for finding in findings]) == (18, [FindingKind.INCOMPLETE])
    monkeypatch.setattr(Store, "write", lambda _, requests: [BackendError("broken")] * len(requests))
    sums, findings = copied(disk, target)
    assert [finding.kind for finding in findings] == [FindingKind.NOT_WRITTEN] * 2


def test_a_read_only_export_is_left_alone(disk: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete one on a mount that cannot be written needs no change; a new chunk names the fix."""
    folder = folder_place(str(tmp_path / "folder"))
    copied(disk, folder)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tierkv.stores.folder._publish", refuse)
    sums, findings = copied(disk, folder)
    assert (sums.present, findings) == (20, [])
    with Store(disk, NAMESPACE, writes=True) as store:
        assert store.write([WriteRequest(chunk_key(30), sealed_frame(NAMESPACE, 30), 30)]) == [None]
    _, (finding,) = copied(disk, folder)
    assert finding.reason.endswith("Read-only file system; give a folder that this user can write")


def test_a_folder_that_cannot_be_made_is_named(disk: Place, tmp_path: Path) -> None:
    """`Not a directory` named neither what failed nor what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match=r"file/folder: no folder can be made there \(.*\); give another one"):
        copied(disk, folder_place(str(tmp_path / "file" / "folder")))


def test_ranks_and_order_travel_between_disks(disk: Place, tmp_path: Path) -> None:
    """After a restart, ranks keep the head of a prompt longest: a moved tier must evict as the old one did."""
    new = place_at(tmp_path / "new", "disk")
    _, findings = copied(disk, new)
    assert findings == []
    with Store(new, NAMESPACE, writes=False) as store:
        listed = [each for each in store.list_frames() if isinstance(each, StoredFrame)]
    assert [each.rank for each in listed] == list(range(20))


def test_frames_in_the_clear_stay_out_of_a_concealing_tier(disk: Place, tmp_path: Path) -> None:
    """A tier that encrypts would otherwise hold readable chunks, which it then refuses."""
    vault = replace(place_at(tmp_path / "vault", "disk"), concealing_codec="aes-gcm", accepts_clear=False)
    sums, findings = copied(disk, vault)
    assert sums.chunks == 0
    assert {finding.kind for finding in findings} == {FindingKind.REFUSED}
    assert "aes-gcm" in findings[0].reason


def test_approximations_stay_out_of_an_exact_tier(tmp_path: Path) -> None:
    """A tier with lossy = false promises exact bits."""
    source, target = (
        place_at(tmp_path / "one", "disk"),
        replace(place_at(tmp_path / "two", "disk"), accepts_lossy=False),
    )
    frame = memoryview(bytearray(sealed_frame(NAMESPACE, 1)))
    pack_header(parse_header(frame)._replace(approximate=True), frame)
    with Store(source, NAMESPACE, writes=True) as store:
        request = store.for_write(chunk_key(1), frame, parse_header(frame), 0)
        assert store.write([request]) == [None]
    _, findings = copied(source, target)
    assert [finding.kind for finding in findings] == [FindingKind.REFUSED]


def test_an_interrupted_export_says_so_at_its_import(disk: Place, tmp_path: Path) -> None:
    """A backup of half the chunks must not look whole."""
    folder, new = folder_place(str(tmp_path / "folder")), place_at(tmp_path / "new", "disk")
    fill(folder, NAMESPACE, range(5))
    sums, findings = copied(folder, new)
    assert sums.chunks == 5
    assert [finding.kind for finding in findings] == [FindingKind.INCOMPLETE]
    copied(disk, folder)
    next((tmp_path / "folder").rglob("*.frame")).unlink()
    _, findings = copied(folder, place_at(tmp_path / "newer", "disk"))
    assert [(finding.kind, "20 chunks, and 19" in finding.reason) for finding in findings] == [
        (FindingKind.MISSING, True)
    ]


def test_a_dry_run_writes_nothing(disk: Place, tmp_path: Path) -> None:
    """A look before the move shows chunks and bytes."""
    folder, sums = folder_place(str(tmp_path / "folder")), Copied()
    with Store(disk, NAMESPACE, writes=False) as store:
        assert list(StoreCopy(store, None, folder, sums, dry_run=True).run()) == []
    assert (sums.chunks, sums.frame_bytes) == (20, 20 * FRAME_BYTES)
    assert not (tmp_path / "folder").exists()


def test_one_place_under_two_names_is_one(tmp_path: Path) -> None:
    """A copy onto itself would wait for its own lock, or do nothing."""
    place = place_at(tmp_path / "kv", "disk")
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    assert is_same_place(place, place_at(tmp_path / "link", "disk"))
    assert is_same_place(place, place_at(f"{tmp_path}/kv/", "disk"))
    assert not is_same_place(place, place_at(tmp_path / "other", "disk"))
