"""Fixtures of the disk tier's tests: a path, and opening the tier there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, make_namespace, read_log

import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.frames.recognition import recognise_frame
from tierkv.testing.conformance.session import Session
from tierkv.types.keys import Key
from tierkv_disk import DiskOptions


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Path of the tier; nothing exists there yet."""
    return tmp_path / "disk"


@pytest.fixture
def directory(place: Path) -> Path:
    """Directory of the tests' namespace."""
    return place / make_namespace().fingerprint().hex()


@pytest.fixture
def open_disk(place: Path) -> Iterator[OpenDisk]:
    """Open the tier at ``place``: frames of up to 4 KiB in segments of 1 MiB by default."""
    opened: list[Session] = []

    def open_(
        *,
        frame_bytes_max: int = PAGE,
        capacity_bytes: int | None = 1 << 20,
        model: str = "disk-tests",
        **options: object,
    ) -> Session:
        namespace = make_namespace(model)
        recognise = partial(recognise_frame, namespace.fingerprint(), PAGE)
        context = BackendContext("disk", namespace, frame_bytes_max, capacity_bytes, recognise)
        wanted = {"path": str(place), "segment_bytes": 1 << 20, "min_free_bytes": 0, **options}
        opened.append(Session(tierkv_disk.PLUGIN, context, DiskOptions(**wanted)))
        return opened[-1]

    yield open_
    for session in opened:
        session.close()


@pytest.fixture
def page_of(directory: Path) -> Callable[[Key], tuple[Path, int]]:
    """Find the segment file and the page of a key."""

    def find(key: Key) -> tuple[Path, int]:
        line = [line for line in read_log(directory / "index.log") if line.key == key][-1]
        assert line.kind == 1
        return directory / f"segment-{line.segment:05d}.dat", line.page

    return find
