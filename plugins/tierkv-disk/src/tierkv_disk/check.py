"""What ``tierkv check`` says of a disk tier. Looks, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tierkv.abc import Finding
from tierkv.errors import BackendError
from tierkv_disk import layout
from tierkv_disk.directio import supports_direct
from tierkv_disk.options import DiskOptions


def check(options: DiskOptions, capacity_bytes: int | None) -> Iterator[Finding]:
    """Findings on path, format, permission, free space, O_DIRECT and locks; stops where the rest makes no sense."""
    path = Path(options.path).expanduser().absolute()
    try:
        layout.check_ours(path)
    except OSError as error:
        detail = str(error) if isinstance(error, BackendError) else f"{path}: {error.strerror}"
        yield Finding("path", False, detail, "give `path` a new or empty directory that this user may use")
        return
    existing = _nearest_existing(path)
    is_new = existing != path
    yield Finding("path", True, f"{path} {'will be created' if is_new else 'exists'}")
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("permission", False, f"{existing} is not writable", f"chown or chmod {existing}, or another `path`")
        return
    try:
        direct = supports_direct(existing)
    except OSError as error:
        yield Finding("permission", False, f"no file can be created in {existing}: {error.strerror}", "another `path`")
        return
    yield Finding("permission", True, f"{existing} is writable")
    yield _direct_finding(options, existing, direct)
    yield _space_finding(options, existing, path, capacity_bytes)
    if not is_new:
        yield from _lock_findings(path)


def _nearest_existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _direct_finding(options: DiskOptions, existing: Path, direct: bool) -> Finding:
    if options.direct_io == "off":
        return Finding("direct I/O", True, "switched off: the page cache is used")
    if direct:
        return Finding("direct I/O", True, f"O_DIRECT works in {existing}")
    fix = "put `path` on ext4 or XFS on a local disk"
    return Finding("direct I/O", options.direct_io == "auto", f"no O_DIRECT in {existing}: the page cache is used", fix)


def _space_finding(options: DiskOptions, existing: Path, path: Path, capacity_bytes: int | None) -> Finding:
    free = shutil.disk_usage(existing).free
    held = sum(file.stat().st_size for file in path.glob("*/segment-*.dat")) if existing == path else 0
    usable = max(0, free - options.min_free_bytes) + held
    detail = f"{free} bytes free, {options.min_free_bytes} kept for others, {held} held already"
    if capacity_bytes is None:
        return Finding("space", usable > 0, f"{detail}; no capacity is set", "" if usable else "free some space")
    if usable >= capacity_bytes:
        return Finding("space", True, f"{detail}; enough for the capacity of {capacity_bytes}")
    return Finding(
        "space", False, f"{detail}; the capacity is {capacity_bytes}", f"set the capacity to {usable} or free space"
    )


def _lock_findings(path: Path) -> Iterator[Finding]:
    for directory in sorted(entry for entry in path.iterdir() if (entry / layout.LOCK_NAME).exists()):
        owner = layout.lock_owner(directory)
        if owner is None:
            yield Finding("lock", True, f"namespace {directory.name} is free")
        else:
            yield Finding(
                "lock", False, f"namespace {directory.name} is in use by process {owner}", "stop it before you start"
            )
