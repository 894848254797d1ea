"""Targets of the harness: local backends with small sizes, so that growth and rewriting are frequent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tierkv_disk
import tierkv_fsspec
import tierkv_lmdb
from tierkv.abc import BackendContext, BackendPlugin
from tierkv.testing.conformance.session import Session
from tierkv.types.namespace import Namespace
from tierkv_disk.recovery import recovery

PAGE = 4096
SIZES = (900, PAGE, 2 * PAGE, 5 * PAGE + 17)
FRAME_BYTES_MAX = 6 * PAGE
CAPACITY_BYTES = 4 << 20
MIB = 1 << 20


def namespace(room: int) -> Namespace:
    """Namespace of a room: each room has a model of its own."""
    groups = ((16, (4096,), "full_attention", None),)
    return Namespace(f"harness-{room}", "r1", "bfloat16", "page", groups, 4, 16)


@dataclass(frozen=True, slots=True)
class Target:
    """Backend, and what it promises."""

    name: str
    """Name on the command line."""
    plugin: BackendPlugin
    """Plugin under test."""
    options: Callable[[Path, int], object]
    """Options for a place, one of several variants."""
    shares_room: bool
    """Whether several processes may write one namespace."""
    forces_frames: bool
    """Whether no acknowledged frame is lost by a power cut."""
    forces_deletes: bool
    """Whether no power cut undoes an acknowledged delete."""

    def open(self, place: Path, room: int = 0, variant: int = 0) -> Session:
        """Open a room; raises what the plugin raises."""
        context = BackendContext(self.name, namespace(room), FRAME_BYTES_MAX, CAPACITY_BYTES)
        return Session(self.plugin, context, self.options(place, variant))


def _disk(place: Path, variant: int) -> tierkv_disk.DiskOptions:
    return tierkv_disk.DiskOptions(
        str(place / "tier"),
        durability="always" if variant % 2 else "batch",
        segment_bytes=MIB,
        min_free_bytes=0,
        direct_io="off" if variant // 2 % 2 else "auto",
    )


def _fsspec(place: Path, variant: int) -> tierkv_fsspec.FsspecOptions:
    return tierkv_fsspec.FsspecOptions(url=f"file://{place}/tier")


def _lmdb(place: Path, variant: int) -> tierkv_lmdb.LmdbOptions:
    return tierkv_lmdb.LmdbOptions(path=str(place / "tier"), durability="batch" if variant % 2 else "always")


TARGETS = {
    target.name: target
    for target in (
        Target("disk", tierkv_disk.PLUGIN, _disk, shares_room=False, forces_frames=True, forces_deletes=True),
        Target("fsspec", tierkv_fsspec.PLUGIN, _fsspec, shares_room=True, forces_frames=False, forces_deletes=False),
        Target("lmdb", tierkv_lmdb.PLUGIN, _lmdb, shares_room=False, forces_frames=True, forces_deletes=False),
    )
}


def rewrite_logs_often() -> None:
    """Let a disk tier replace its log every few operations, in this process and those that it forks."""
    recovery.COMPACT_RECORDS_MIN = 16
