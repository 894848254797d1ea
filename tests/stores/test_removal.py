"""Removal of the oldest chunks: by time where it is known, by the order of writing where it is not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import FRAME_BYTES, chunk_key, fill, model_namespace, place_at

from tierkv.abc import StoredFrame, StoredNamespace
from tierkv.errors import BackendError
from tierkv.stores.export_sums import ExportSums
from tierkv.stores.folder import Exported, note_export, read_manifest
from tierkv.stores.places import Place, folder_place
from tierkv.stores.removal import Removed, chosen_frames, collect, plan_collection, remove_chunks, remove_namespace
from tierkv.stores.selection import ChunkFilter
from tierkv.stores.store import Store
from tierkv.stores.verification import Verified, verify_store
from tierkv_fsspec.backend import object_name


def kept(place: Place, model: str, count: int) -> list[int]:
    """Numbers of the chunks that are still there."""
    with Store(place, model_namespace(model), writes=False) as store:
        answers = store.contains([chunk_key(number) for number in range(count)])
    return [number for number, answer in enumerate(answers) if answer is True]


def test_a_disk_loses_its_first_written_chunks(tmp_path: Path) -> None:
    """A disk tier does not know times: the order of its log is its age."""
    place, stored = place_at(tmp_path / "kv", "disk"), StoredNamespace(model_namespace("m"))
    fill(place, model_namespace("m"), range(20))
    plan, sums = plan_collection([(place, stored)], 12 * FRAME_BYTES), Removed()
    assert list(collect(place, stored, plan, sums, dry_run=False)) == []
    assert kept(place, "m", 20) == list(range(8, 20))


def test_the_least_recently_used_namespace_goes_first(tmp_path: Path) -> None:
    """Chunks of a model that is no longer served are worth least."""
    place = place_at(tmp_path / "kv", "disk")
    stores = []
    for model, used_s in (("new", 2_000_000.0), ("old", 1_000_000.0)):
        fill(place, model_namespace(model), range(10))
        stores.append((place, StoredNamespace(model_namespace(model), last_used_s=used_s)))
    plan, sums = plan_collection(stores, 7 * FRAME_BYTES), Removed()
    for each, stored in stores:
        assert list(collect(each, stored, plan, sums, dry_run=False)) == []
    assert (kept(place, "old", 10), kept(place, "new", 10)) == ([], list(range(3, 10)))


def test_objects_go_by_the_time_of_their_last_write(tmp_path: Path) -> None:
    """An object store knows when each object was written, in whatever order it lists them."""
    place, namespace = place_at(f"file://{tmp_path}/kv", "fsspec"), model_namespace("m")
    fill(place, namespace, range(10))
    files = {path: number for number in range(10) for path in [object_file(tmp_path, number)]}
    for path, number in files.items():
        age_s = 3600 * ((number * 7) % 10)
        os.utime(path, (2_000_000_000 - age_s, 2_000_000_000 - age_s))
    plan, sums = plan_collection([(place, StoredNamespace(namespace))], 4 * FRAME_BYTES), Removed()
    assert list(collect(place, StoredNamespace(namespace), plan, sums, dry_run=False)) == []
    assert sorted(kept(place, "m", 10)) == sorted(number for number in range(10) if (number * 7) % 10 < 4)


def object_file(root: Path, number: int) -> Path:
    """File of a chunk of an object tier."""
    return root / "kv" / model_namespace("m").fingerprint().hex() / object_name(chunk_key(number))


def test_chunks_of_unknown_age_are_kept_and_counted(tmp_path: Path) -> None:
    """`--older-than` on a disk must not remove everything, nor do nothing in silence."""
    place = place_at(tmp_path / "kv", "disk")
    fill(place, model_namespace("m"), range(5))
    with Store(place, model_namespace("m"), writes=True) as store:
        sums = Removed()
        frames = chosen_frames(store, ChunkFilter(stored_before_s=1e12), sums)
        assert list(remove_chunks(store, frames, sums, dry_run=False)) == []
    assert (sums.chunks, sums.unknown_age) == (0, 5)


def test_a_namespace_that_cannot_be_removed_is_not_counted(tmp_path: Path) -> None:
    """An operator who reads "300 chunks removed" does not look at the line above it."""
    place = place_at(tmp_path / "kv", "disk")
    fill(place, model_namespace(), range(3))
    rest = place.backend.at_rest
    assert rest is not None

    def refuse(options: object, namespace: object) -> None:
        del options, namespace
        raise BackendError("access is refused")

    refusing = replace(place, backend=replace(place.backend, at_rest=replace(rest, remove_namespace=refuse)))
    sums = Removed()
    with pytest.raises(BackendError, match="refused"):
        list(remove_namespace(refusing, StoredNamespace(model_namespace()), sums, dry_run=False))
    assert sums == Removed()
    list(remove_namespace(place, StoredNamespace(model_namespace()), sums, dry_run=False))
    assert sums == Removed(3, 3 * FRAME_BYTES, 1)


def test_a_size_that_is_not_reached_removes_nothing(tmp_path: Path) -> None:
    """A cron job runs every night, also when the tier is small."""
    place, stored = place_at(tmp_path / "kv", "disk"), StoredNamespace(model_namespace("m"))
    fill(place, model_namespace("m"), range(5))
    plan = plan_collection([(place, stored)], 100 * FRAME_BYTES)
    assert plan.last_bytes == 0


def test_a_killed_removal_leaves_an_export_that_misses_nothing(tmp_path: Path) -> None:
    """The manifest learns of a removal before chunks go; the next removal counts what a killed one left."""
    place, namespace = folder_place(str(tmp_path / "backup")), model_namespace("m")
    fill(place, namespace, range(10))
    note_export(tmp_path / "backup", Exported(namespace, 10, 10 * FRAME_BYTES))
    with Store(place, namespace, writes=True) as store:
        frames = [each for each in store.list_frames() if isinstance(each, StoredFrame)]
        ExportSums(store).take_out(frames[:6])  # killed here: no chunk went
        assert list(verify_store(store, Verified())) == []
        assert list(remove_chunks(store, frames[:3], Removed(), dry_run=False)) == []
    assert read_manifest(tmp_path / "backup") == [Exported(namespace, 7, 7 * FRAME_BYTES)]


def test_chunks_that_cannot_be_removed_stay_in_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their later loss would be no finding."""
    place, namespace = folder_place(str(tmp_path / "backup")), model_namespace("m")
    fill(place, namespace, range(10))
    note_export(tmp_path / "backup", Exported(namespace, 10, 10 * FRAME_BYTES))
    monkeypatch.setattr(Store, "delete", lambda _store, keys: [BackendError("no"), *[None] * (len(keys) - 1)])
    with Store(place, namespace, writes=True) as store:
        frames = [each for each in store.list_frames() if isinstance(each, StoredFrame)]
        assert len(list(remove_chunks(store, frames[:3], Removed(), dry_run=False))) == 1
    assert read_manifest(tmp_path / "backup") == [Exported(namespace, 8, 8 * FRAME_BYTES)]


def test_a_repair_of_an_export_still_tells_of_lost_files(tmp_path: Path) -> None:
    """A removed chunk is no lost one, and must not hide one."""
    place, namespace = folder_place(str(tmp_path / "backup")), model_namespace("m")
    fill(place, namespace, range(10))
    note_export(tmp_path / "backup", Exported(namespace, 10, 10 * FRAME_BYTES))
    lost, damaged, headless = sorted((tmp_path / "backup").rglob("*.frame"))[:3]
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    headless.write_bytes(b"rubbish")
    with Store(place, namespace, writes=True) as store:
        found = list(verify_store(store, Verified(), repair=True))
        assert sorted(each.kind for each in found) == ["damaged", "damaged", "missing"]
    ((_, chunks, _),) = [(each.namespace, each.chunks, each.frame_bytes) for each in read_manifest(tmp_path / "backup")]
    assert chunks == 8
