"""Opening a disk tier: claim the place, lock the namespace, choose the way of I/O."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, ConfigError
from tierkv_disk import layout
from tierkv_disk.directio import FileIO, round_up, supports_direct
from tierkv_disk.index_log import LogIdentity
from tierkv_disk.options import DiskOptions
from tierkv_disk.segments import Limits, SegmentFiles

FRAME_BYTES_LIMIT = 2**32
"""The log has four bytes for a frame's length."""
logger = logging.getLogger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class Home:
    """A locked namespace directory and how it is used.

    sync: force writes to the device before they are acknowledged. sync_each: and each frame of a batch by itself.
    """

    tier: str
    directory: Path
    identity: LogIdentity
    segments: SegmentFiles
    lock: layout.NamespaceLock
    sync: bool
    sync_each: bool

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.identity.slot_bytes

    def release(self) -> None:
        """Close the segment files, then let others in."""
        self.segments.close()
        self.lock.release()


def enter_home(context: BackendContext, options: DiskOptions) -> Home:
    """Claim, lock and prepare the directory of a namespace.

    Raises:
        ConfigError: the capacity does not hold a single frame, or O_DIRECT is demanded and cannot be had.
        BackendError: see :mod:`tierkv_disk.layout`.
        OSError: the place cannot be used.
    """
    wanted = round_up(max(1, context.frame_bytes_max))
    if wanted >= FRAME_BYTES_LIMIT:
        raise ConfigError(f"frames of {wanted} bytes: a disk tier takes less than 4 GiB; use smaller chunks")
    path = Path(options.path).expanduser().absolute()
    layout.claim(path)
    directory = layout.enter_namespace(path, context.namespace)
    with ExitStack() as undo:
        lock = layout.NamespaceLock(directory)
        undo.callback(lock.release)
        slot_bytes = layout.settle_slot_bytes(directory, context.namespace, wanted)
        if context.capacity_bytes is not None and context.capacity_bytes < slot_bytes:
            raise ConfigError(
                f"capacity of {context.capacity_bytes} bytes: one frame of this stack needs {slot_bytes} in a disk tier"
            )
        layout.sweep(directory)
        io = FileIO(direct=_choose_direct(directory, options, context.tier), bounce_bytes=slot_bytes)
        limits = Limits(context.capacity_bytes, options.min_free_bytes, options.segment_bytes)
        undo.pop_all()
    return Home(
        tier=context.tier,
        directory=directory,
        identity=LogIdentity(context.namespace.fingerprint(), slot_bytes),
        segments=SegmentFiles(directory, slot_bytes, limits, io),
        lock=lock,
        sync=options.durability != "none",
        sync_each=options.durability == "always",
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
