"""Abilities of a disk tier at rest: its namespaces, a reader beside their owner, and their removal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tierkv.abc import BackendContext, StoredNamespace
from tierkv.abc.places import exists
from tierkv.errors import BackendError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_disk.directory import layout
from tierkv_disk.directory.locks import lock_owner
from tierkv_disk.directory.shared import finish_removals, last_used_s, namespaces, remove_namespace, used_bytes
from tierkv_disk.extents import page_of, segment_of
from tierkv_disk.failures import as_tier_error
from tierkv_disk.namespace import LockedNamespace
from tierkv_disk.opening import lock_namespace
from tierkv_disk.options import DiskOptions
from tierkv_disk.reader import DiskReader
from tierkv_disk.recovery.recovery import recover
from tierkv_disk.space.quarantine import Quarantine

SELF = "disk tier"


def stored_namespaces(options: DiskOptions) -> Iterator[StoredNamespace | TierKVError]:
    """Yield the namespaces below ``path``, least recently used first.

    Raises:
        NamespaceMismatchError: it is no directory of a disk tier.
        BackendError: it is absent, or cannot be read.
    """
    path = _path(options)
    try:
        _require_tier(path)
        layout.check_directory(path)
        directories = sorted(namespaces(path), key=last_used_s)
    except TierKVError:
        raise
    except OSError as error:
        raise as_tier_error(error, f"cannot read {path}", tier=SELF) from error
    for directory in directories:
        try:
            if not _is_unfinished(directory):
                yield _stored(directory)
        except (TierKVError, ValueError) as error:
            yield BackendError(f"{directory}: {error}. An engine that opens this namespace writes its description anew")
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as error:
            yield as_tier_error(error, f"cannot read {directory}", tier=SELF)


def _require_tier(path: Path) -> None:
    if not exists(path):
        raise BackendError(f"{path} does not exist: nothing was stored there yet")
    if not exists(path / layout.MARKER_NAME):
        if layout.is_unclaimed(path):
            raise BackendError(f"{path} is empty: nothing was stored there yet")
        raise BackendError(f"{path} is not the directory of a disk tier: it has no {layout.MARKER_NAME}")


def _is_unfinished(directory: Path) -> bool:
    """Whether the creation of a namespace goes on, or was killed: it has neither description nor chunks yet."""
    return not os.path.lexists(directory / layout.NAMESPACE_NAME) and not any(directory.glob("segment-*"))


def _stored(directory: Path) -> StoredNamespace:
    described = layout.read_document(directory / layout.NAMESPACE_NAME).get("namespace")
    namespace = Namespace.from_description(described)
    if namespace.fingerprint().hex() != directory.name:
        raise ValueError(f"{layout.NAMESPACE_NAME} describes another namespace than the directory's name")
    owner = lock_owner(directory)
    used = last_used_s(directory) or None
    return StoredNamespace(namespace, used_bytes(directory), used, owner and f"process {owner}")


def open_reader(context: BackendContext, options: DiskOptions) -> DiskReader:
    """Open a namespace for reading, without its lock.

    Raises:
        BackendError: there is no such namespace, or its index log is missing, damaged, or cannot be read.
    """
    directory = _path(options) / context.namespace.fingerprint().hex()
    try:
        if not exists(directory / layout.NAMESPACE_NAME):
            raise BackendError(f"{directory} is not there: nothing is stored for this namespace", tier=context.tier)
        slot_bytes = layout.read_slot_bytes(directory, context.namespace)
        return DiskReader(directory, context.namespace, slot_bytes, context.tier)
    except TierKVError:
        raise
    except OSError as error:
        raise as_tier_error(error, f"cannot read {directory}", tier=context.tier) from error


def remove_stored(options: DiskOptions, namespace: Namespace) -> None:
    """Remove a namespace and its files.

    Raises:
        BackendUnavailableError: a process has it open; names it.
        BackendError: it cannot be removed.
    """
    directory = _path(options) / namespace.fingerprint().hex()
    try:
        remove_namespace(directory)
    except TierKVError:
        raise
    except FileNotFoundError:
        return
    except OSError as error:
        raise as_tier_error(error, f"cannot remove {directory}", tier=SELF) from error


def finish_removed(options: DiskOptions) -> int:
    """Remove what killed removals left below ``path``. Returns the bytes of their files.

    Raises:
        BackendError: ``path`` cannot be read.
    """
    path = _path(options)
    try:
        return finish_removals(path) if exists(path / layout.MARKER_NAME) else 0
    except OSError as error:
        raise as_tier_error(error, f"cannot read {path}", tier=SELF) from error


def give_up_room(context: BackendContext, options: DiskOptions) -> int:
    """Cut free pages off the ends of the segment files. Returns their bytes.

    Raises:
        BackendUnavailableError: a process has the namespace open; names it.
        BackendError: it cannot be used.
    """
    try:
        locked = lock_namespace(context, options)
        try:
            return _cut_segments(locked)
        finally:
            locked.release()
    except TierKVError:
        raise
    except OSError as error:
        raise as_tier_error(error, f"cannot shorten files in {_path(options)}", tier=context.tier) from error


def _cut_segments(locked: LockedNamespace) -> int:
    quarantine = Quarantine(locked.files.directory, locked.quarantine_bytes_max)
    table, log, _ = recover(locked.files, quarantine, sync=locked.sync)
    log.close()
    runs = [run for key in table.entries if (found := table.find_frame(key)) is not None for run in found[0]]
    runs += [run for entry in quarantine for run in entry.runs]
    ends: dict[int, int] = {}
    for address, pages in runs:
        segment = segment_of(address)
        ends[segment] = max(ends.get(segment, 0), page_of(address) + pages)
    segments = locked.files.segments
    before = segments.size_bytes
    for segment, pages in list(segments.pages.items()):
        if ends.get(segment, 0) < pages:
            segments.cut_segment(segment, ends.get(segment, 0))
    return before - segments.size_bytes


def _path(options: DiskOptions) -> Path:
    return Path(options.path)
