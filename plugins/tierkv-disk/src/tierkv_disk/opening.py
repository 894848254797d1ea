"""Opening a disk tier: claim the directory, lock the namespace, choose the I/O mode, recover."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import exists
from tierkv.errors import BackendError, ConfigError, TierKVError
from tierkv_disk.backend import DiskBackend
from tierkv_disk.directory import layout
from tierkv_disk.directory.files import set_aside
from tierkv_disk.directory.locks import LOCK_NAME, NamespaceLock
from tierkv_disk.directory.shared import SharedDirectory, SharedLimits, namespaces
from tierkv_disk.extents import FRAME_BYTES_LIMIT
from tierkv_disk.failures import NO_SPACE, as_tier_error
from tierkv_disk.log.index_log import LogIdentity, has_log_of
from tierkv_disk.namespace import LockedNamespace
from tierkv_disk.open_namespace import OpenNamespace
from tierkv_disk.options import DiskOptions
from tierkv_disk.recovery.frame_search import FrameSearch
from tierkv_disk.recovery.recovery import NamespaceFiles
from tierkv_disk.segments.direct_io import FileIO, accepts_direct, round_up, supports_direct
from tierkv_disk.segments.segment_files import SegmentFiles, SegmentLimits

logger = plugin_logger("tierkv_disk")


def open_backend(context: BackendContext, options: DiskOptions) -> DiskBackend:
    """Open the disk tier of a namespace.

    Raises:
        ConfigError: capacity or options cannot work.
        BackendError: the directory cannot be used, belongs to another program, or is in use. The message names the
            cause and the remedy.
    """
    return DiskBackend(partial(_open_namespace, context, options))


def _open_namespace(context: BackendContext, options: DiskOptions) -> OpenNamespace:
    try:
        locked = lock_namespace(context, options)
        try:
            return OpenNamespace(locked)
        except BaseException:
            locked.release()
            raise
    except TierKVError as error:
        error.tier = context.tier
        raise
    except OSError as error:
        what = f"cannot use {options.path} (`path` must be a directory on a healthy disk that this user may write)"
        raise as_tier_error(error, what, tier=context.tier) from error


def lock_namespace(context: BackendContext, options: DiskOptions) -> LockedNamespace:
    """Claim, lock and prepare the directory of a namespace.

    Raises:
        ConfigError: the capacity does not hold a single frame, or the frames are too long.
        BackendError: the directory belongs to another program or process, or O_DIRECT is required and unavailable.
        OSError: the directory cannot be used.
    """
    frame_bytes_max = round_up(max(1, context.frame_bytes_max))
    if frame_bytes_max >= FRAME_BYTES_LIMIT:
        raise ConfigError(f"frames of {frame_bytes_max} bytes: a disk tier takes less than 4 GiB; use smaller chunks")
    _require_room_for_one(context.capacity_bytes, options.directory_bytes_max, frame_bytes_max)
    path = Path(options.path)
    layout.claim_directory(path)
    shared = SharedDirectory(path, _shared_limits(options), context.tier)
    with ExitStack() as undo:
        with shared.locked():
            directory = layout.make_namespace_directory(path, context.namespace)
            lock = NamespaceLock(directory, is_use=context.counts_as_use)
            undo.callback(lock.release)
        if not exists(directory / layout.NAMESPACE_NAME):
            _warn_of_other_divisions(path, context)
        slot_bytes = _read_manifest(directory, context)
        layout.remove_temporaries(directory, layout.LOG_TEMPORARY_NAME)
        io = FileIO(direct=_choose_direct(directory, options, context.tier), bounce_bytes=frame_bytes_max)
        undo.pop_all()
    limits = SegmentLimits(context.capacity_bytes, options.segment_bytes)
    segments = SegmentFiles(directory, frame_bytes_max, limits, shared, io)
    search = FrameSearch(segments, context.recognise_frame, frame_bytes_max)
    return LockedNamespace(
        tier=context.tier,
        namespace=context.namespace,
        files=NamespaceFiles(directory, LogIdentity(context.namespace.fingerprint()), segments, search, slot_bytes),
        lock=lock,
        frame_bytes_max=frame_bytes_max,
        sync=options.durability != "none",
        sync_each=options.durability == "always",
        quarantine_bytes_max=options.quarantine_bytes_max,
    )


def _read_manifest(directory: Path, context: BackendContext) -> int:
    """Read the slot size of format 1; 0 for the current format. A damaged or missing manifest is replaced.

    The directory's name is the namespace, and so is the seed of all checksums. A log that is not of this namespace and
    the current format is set aside too; then the frames of this namespace are found by a search.
    """
    is_ours = has_log_of(directory, LogIdentity(context.namespace.fingerprint()))
    try:
        return layout.read_slot_bytes(directory, context.namespace)
    except layout.WrongNamespaceError as error:
        if not is_ours:
            raise
        layout.replace_damaged_manifest(directory, context.namespace, error)
    except layout.DamagedDocumentError as error:
        layout.replace_damaged_manifest(directory, context.namespace, error)
        log = directory / layout.LOG_NAME
        if not is_ours and os.path.lexists(log):
            set_aside(log, "its header is not of this namespace")
    return 0


def _warn_of_other_divisions(path: Path, context: BackendContext) -> None:
    """Log a warning if other namespaces below ``path`` have the same KV in chunks with another number of parts."""
    for directory in namespaces(path):
        try:
            described = layout.read_document(directory / layout.NAMESPACE_NAME).get("namespace")
        except (OSError, TierKVError):
            continue
        if context.namespace.is_other_division(described):
            logger.warning(
                "tier %s: %s has chunks of this model that an engine with another number of workers stored, and they "
                "are not found: set chunk.parts to one number in the stacks of all engines, or remove that directory",
                context.tier,
                directory,
            )
            return


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
    try:
        is_supported = supports_direct(directory)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        is_supported = accepts_direct(directory / LOCK_NAME)  # a full disk has its chunks all the same
    if is_supported:
        return True
    if options.direct_io == "on":
        raise BackendError(
            f"direct_io = 'on', but the file system of {directory} has no O_DIRECT: "
            "use another `path`, or direct_io = 'auto'"
        )
    logger.warning("tier %s: no O_DIRECT in %s: reads and writes go through the page cache, slower", tier, directory)
    return False
