"""Promise 5 beyond kill -9: acknowledged frames survive a power cut, and a record never describes half a frame."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_support import PAGE, make_namespace
from power_cut import Platter

import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.testing.conformance.crash import KEYS, random_operations
from tierkv.testing.conformance.crash_ledger import Ledger
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv_disk import DiskOptions
from tierkv_disk.log.index_log import IndexLog
from tierkv_disk.open_namespace import OpenNamespace

CONTEXT = BackendContext("disk", make_namespace(), 2 * PAGE, 12 * 2 * PAGE + PAGE)
OPERATIONS = 30

SIZES = (PAGE, 2 * PAGE)
"""Short and long frames: some are in several runs."""


def options(place: Path, durability: str) -> DiskOptions:
    """Small segments, so that the run needs several growths."""
    return DiskOptions(str(place), durability=durability, min_free_bytes=0, segment_bytes=1 << 20)


class Cutter:
    """At some steps, take an image of the disk, recover from it, and compare with the ledger."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.images = 0
        self.platter: Platter | None = None
        self.ledger: Ledger | None = None
        self._place = tmp_path / "image"
        self._rng = random.Random(seed)
        self._judging = False

    def step(self) -> None:
        if self._judging or self.ledger is None or self.platter is None or self._rng.random() > 0.3:
            return
        self._judging = True
        self.platter.image(self._place, self._rng)
        with Session(tierkv_disk.PLUGIN, CONTEXT, options(self._place, "none")) as recovered:
            self.ledger.verify(recovered, settle=False)
        shutil.rmtree(self._place)
        self.images += 1
        self._judging = False


@pytest.fixture
def cutter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Cutter]:
    """Cutter that watches the disk at ``tmp_path / "disk"``."""
    cutter = Cutter(tmp_path, request.param)
    (tmp_path / "disk").mkdir()
    cutter.platter = Platter(tmp_path / "disk", monkeypatch, cutter.step)
    yield cutter
    cutter.platter.release()


def play(cutter: Cutter, place: Path, durability: str, seed: int) -> None:
    """Write, overwrite and delete while the cutter watches."""
    ledger = Ledger(KEYS)
    with Session(tierkv_disk.PLUGIN, CONTEXT, options(place, durability)) as session:
        cutter.ledger = ledger
        for operation in random_operations(SIZES, 4, 1, random.Random(seed)):
            ledger.begin(operation)
            operation.perform(session)
            ledger.acknowledge()
            cutter.step()
            if operation.number == OPERATIONS:
                break
        cutter.ledger = None


@pytest.mark.parametrize("cutter", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("durability", ["batch", "always"])
def test_acknowledged_frames_survive(cutter: Cutter, tmp_path: Path, durability: str) -> None:
    """At any step and for any lost sectors, recovery finds every key in a promised state, whole."""
    play(cutter, tmp_path / "disk", durability, cutter.images)
    assert cutter.images > 20


@pytest.mark.parametrize("cutter", [4, 5], indirect=True)
def test_a_rewrite_of_the_log_survives(cutter: Cutter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery is complete even while the log is replaced by a shorter one every few operations."""
    monkeypatch.setattr("tierkv_disk.recovery.recovery.COMPACT_RECORDS_MIN", 4)
    rewrites: list[Path] = []
    create = IndexLog.create.__func__  # type: ignore[attr-defined]

    def counted(cls: type[IndexLog], directory: Path, *arguments: object, **options: object) -> IndexLog:
        if directory.is_relative_to(tmp_path / "disk"):
            rewrites.append(directory)
        return create(cls, directory, *arguments, **options)

    monkeypatch.setattr(IndexLog, "create", classmethod(counted))
    play(cutter, tmp_path / "disk", "batch", cutter.images)
    assert len(rewrites) > 2


@pytest.mark.parametrize("cutter", [1], indirect=True)
def test_the_simulated_device_loses_enough(cutter: Cutter, tmp_path: Path) -> None:
    """Without syncs the same run must fail; otherwise the test above proves nothing."""
    with pytest.raises(AssertionError, match="possible"):
        play(cutter, tmp_path / "disk", "none", 0)
    cutter.ledger = None


@pytest.mark.parametrize("cutter", [6], indirect=True)
def test_each_frame_of_a_batch_by_itself(cutter: Cutter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``"always"``: of a batch interrupted by a power cut, every frame before the current one is stored."""
    place = tmp_path / "disk"
    before: list[int] = []
    keys = [make_key(number) for number in range(4)]

    def look() -> None:
        if cutter.platter is None or not before:
            return
        cutter._judging = True  # the steps of this check are no moments for a cut
        cutter.platter.image(tmp_path / "image", random.Random(cutter.images))
        cutter.images += 1
        with Session(tierkv_disk.PLUGIN, CONTEXT, options(tmp_path / "image", "none")) as recovered:
            assert recovered.contains(keys[: len(before) - 1]) == [True] * (len(before) - 1)
        shutil.rmtree(tmp_path / "image")
        cutter._judging = False

    original = OpenNamespace._write

    def counted(self: OpenNamespace, requests: list[object]) -> object:
        before.append(len(requests))
        look()
        return original(self, requests)  # type: ignore[arg-type]

    with Session(tierkv_disk.PLUGIN, CONTEXT, options(place, "always")) as session:
        monkeypatch.setattr(OpenNamespace, "_write", counted)
        session.put({key: make_frame(key, 1, PAGE) for key in keys})
    assert before == [1, 1, 1, 1]
    assert cutter.images == 4
