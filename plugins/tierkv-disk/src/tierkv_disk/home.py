"""Opening a disk tier: claim the place, lock the namespace, choose the way of I/O."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, ConfigError
from tierkv.types.namespace import Namespace
from tierkv_disk import layout
from tierkv_disk.directio import FileIO, round_up, supports_direct
from tierkv_disk.finding import FrameFinder
from tierkv_disk.index_log import LogIdentity
from tierkv_disk.locks import NamespaceLock
from tierkv_disk.options import DiskOptions
from tierkv_disk.recovery import Source
from tierkv_disk.segments import Limits, SegmentFiles
from tierkv_disk.shared import SharedDirectory, SharedLimits

FRAME_BYTES_LIMIT = 2**32
"""The log has four bytes for a frame's length."""
logger = logging.getLogger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class Home:
    """A locked namespace directory and how it is used.

    source: its files. sync: force writes to the device before they are acknowledged. sync_each: and each frame of a
    batch by itself.
    """

    tier: str
    namespace: Namespace
    source: Source
    lock: NamespaceLock
    frame_bytes_max: int
    sync: bool
    sync_each: bool
    quarantine_bytes_max: int

    def settled(self) -> None:
        """The files are those of the newest format now."""
        if self.source.slot_bytes:
            layout.publish_manifest(self.source.directory, self.namespace)

    def release(self) -> None:
        """Close the segment files, then let others in."""
        self.source.segments.close()
        self.lock.release()


def enter_home(context: BackendContext, options: DiskOptions) -> Home:
    """Claim, lock and prepare the directory of a namespace.

    Raises:
        ConfigError: the capacity does not hold a single frame, or O_DIRECT is demanded and cannot be had.
        BackendError: see :mod:`tierkv_disk.layout`.
        OSError: the place cannot be used.
    """
    frame_bytes_max = round_up(max(1, context.frame_bytes_max))
    if frame_bytes_max >= FRAME_BYTES_LIMIT:
        raise ConfigError(f"frames of {frame_bytes_max} bytes: a disk tier takes less than 4 GiB; use smaller chunks")
    _require_room_for_one(context.capacity_bytes, options.directory_bytes_max, frame_bytes_max)
    path = Path(options.path).expanduser().absolute()
    layout.claim(path)
    shared = SharedDirectory(path, _shared_limits(options), context.tier)
    with ExitStack() as undo:
        with shared.locked():
            directory = layout.enter_namespace(path, context.namespace)
            lock = NamespaceLock(directory)
            undo.callback(lock.release)
        slot_bytes = layout.read_slot_bytes(directory, context.namespace)
        layout.sweep(directory)
        io = FileIO(direct=_choose_direct(directory, options, context.tier), bounce_bytes=frame_bytes_max)
        undo.pop_all()
    limits = Limits(context.capacity_bytes, options.segment_bytes)
    segments = SegmentFiles(directory, frame_bytes_max, limits, shared, io)
    finder = FrameFinder(segments, context.recognise_frame, frame_bytes_max)
    return Home(
        tier=context.tier,
        namespace=context.namespace,
        source=Source(directory, LogIdentity(context.namespace.fingerprint()), segments, finder, slot_bytes),
        lock=lock,
        frame_bytes_max=frame_bytes_max,
        sync=options.durability != "none",
        sync_each=options.durability == "always",
        quarantine_bytes_max=options.quarantine_bytes_max,
    )


def _require_room_for_one(capacity_bytes: int | None, directory_bytes_max: int | None, frame_bytes_max: int) -> None:
    if capacity_bytes is not None and capacity_bytes < frame_bytes_max:
        raise ConfigError(
            f"capacity of {capacity_bytes} bytes: one frame of this stack needs {frame_bytes_max} in a disk tier"
        )
    if directory_bytes_max is not None and directory_bytes_max < frame_bytes_max:
        raise ConfigError(
            f"directory_bytes_max = {directory_bytes_max}: one frame of this stack needs {frame_bytes_max} bytes"
        )


def _shared_limits(options: DiskOptions) -> SharedLimits:
    return SharedLimits(
        bytes_max=options.directory_bytes_max,
        high=options.high_watermark,
        low=options.low_watermark,
        min_free_bytes=options.min_free_bytes,
        reclaim=options.reclaim_unused,
    )


def _choose_direct(directory: Path, options: DiskOptions, tier: str) -> bool:
    if options.direct_io == "off":
        return False
    if supports_direct(directory):
        return True
    if options.direct_io == "on":
        raise BackendError(
            f"direct_io = 'on', but the file system of {directory} has no O_DIRECT: "
            "use another `path`, or direct_io = 'auto'"
        )
    logger.warning("tier %s: no O_DIRECT in %s: reads and writes go through the page cache, slower", tier, directory)
    return False
