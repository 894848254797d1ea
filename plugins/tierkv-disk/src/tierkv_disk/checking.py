"""Checks of a disk tier for ``tierkv check``. They change nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tierkv.abc import CheckResult
from tierkv.abc.places import exists, why_not_writable
from tierkv.errors import BackendError
from tierkv.types.sizes import round_size
from tierkv_disk.directory import layout
from tierkv_disk.directory.locks import lock_owner
from tierkv_disk.directory.shared import last_used_s, namespaces, used_bytes
from tierkv_disk.extents import PAGE_BYTES
from tierkv_disk.options import DiskOptions
from tierkv_disk.segments.direct_io import supports_direct
from tierkv_disk.space.quarantine import QUARANTINE_NAME, read_quarantine


def check(options: DiskOptions, capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check path, permission, O_DIRECT, space, limit, locks and quarantine; stop at the first fatal result."""
    path = Path(options.path)
    try:
        layout.check_directory(path)
    except OSError as error:
        detail = str(error) if isinstance(error, BackendError) else f"{path}: {error.strerror}"
        yield _bad("path", detail, "give `path` a new or empty directory that this user may use")
        return
    existing = next(candidate for candidate in (path, *path.parents) if exists(candidate))
    yield _good("path", f"{path} {'exists' if existing == path else 'will be created'}")
    problem = why_not_writable(existing)
    if problem:
        yield _bad("permission", problem, f"let this user write in {existing} (chown, chmod), or choose another `path`")
        return
    yield _good("permission", f"{existing} is writable")
    yield _check_direct(options, existing)
    yield _check_space(options, path, existing, capacity_bytes)
    yield from _check_limit(options, path, existing, capacity_bytes)
    if existing == path:
        yield from _check_namespaces(path)


def _good(subject: str, detail: str) -> CheckResult:
    return CheckResult(subject, ok=True, detail=detail)


def _bad(subject: str, detail: str, fix: str) -> CheckResult:
    return CheckResult(subject, ok=False, detail=detail, fix=fix)


def _check_direct(options: DiskOptions, existing: Path) -> CheckResult:
    if options.direct_io == "off":
        return _good("direct I/O", "switched off: reads and writes go through the page cache")
    if supports_direct(existing):
        return _good("direct I/O", f"O_DIRECT works in {existing}")
    if options.direct_io == "auto":
        return _good("direct I/O", f"no O_DIRECT in {existing}: reads and writes go through the page cache, slower")
    return _bad("direct I/O", f"no O_DIRECT in {existing}", "set direct_io = 'auto', or use a local ext4 or XFS")


def _check_space(options: DiskOptions, path: Path, existing: Path, capacity_bytes: int | None) -> CheckResult:
    held = sum(map(_held_bytes, path.iterdir())) if existing == path else 0
    free = shutil.disk_usage(existing).free
    detail = f"{round_size(free)} free, {round_size(options.min_free_bytes)} of it reserved by min_free_bytes"
    detail += f", {round_size(held)} held already"
    missing = (1 if capacity_bytes is None else capacity_bytes) - (free - options.min_free_bytes + held)
    if missing <= 0:
        enough = "" if capacity_bytes is None else f": enough for {round_size(capacity_bytes)}"
        return _good("space", detail + enough)
    return _bad("space", detail, f"free {round_size(missing)}, or lower the tier's capacity or min_free_bytes")


def _check_limit(options: DiskOptions, path: Path, existing: Path, capacity_bytes: int | None) -> Iterator[CheckResult]:
    limit = options.directory_bytes_max
    if limit is None:
        return
    used = used_bytes(path) if existing == path else 0
    high, low = int(options.high_watermark * limit), int(options.low_watermark * limit)
    unused = "unused namespaces are removed" if options.reclaim_unused else "growth is refused"
    detail = f"{round_size(used)} of {round_size(limit)} used; above {round_size(high)} {unused}"
    detail += f" down to {round_size(low)}" * options.reclaim_unused
    if capacity_bytes is not None and capacity_bytes > high:
        needed = int(capacity_bytes / options.high_watermark) + 1
        fix = f"set directory_bytes_max to at least {needed}, or lower `capacity`"
        yield _bad("limit", f"{detail}: less than the capacity of {round_size(capacity_bytes)}", fix)
    elif used > high and not options.reclaim_unused:
        yield _bad("limit", detail, "raise directory_bytes_max, or remove unused namespaces")
    else:
        yield _good("limit", detail)


def _check_namespaces(path: Path) -> Iterator[CheckResult]:
    for directory in namespaces(path):
        owner = lock_owner(directory)
        name = f"namespace {directory.name} ({_model_of(directory)}, {round_size(_held_bytes(directory))})"
        if owner is None:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_used_s(directory)))
            yield _good("lock", f"{name} is free, last used {used}")
        else:
            fix = f"stop process {owner} before a stack with this model starts here"
            yield _bad("lock", f"{name} is in use by process {owner}", fix)
        listed = list(read_quarantine(directory))
        if listed:
            held = sum(entry.pages for entry in listed) * PAGE_BYTES
            detail = f"{name}: {len(listed)} bad frames out of service, {round_size(held)}, "
            detail += f"see {directory / QUARANTINE_NAME}"
            yield _bad("quarantine", detail, "check the health of this disk; the file may be deleted afterwards")


def _held_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("segment-*.dat"))


def _model_of(directory: Path) -> str:
    try:
        namespace = layout.read_document(directory / layout.NAMESPACE_NAME).get("namespace")
    except OSError as error:
        return f"unknown model: {error}"
    return f"model {namespace.get('model')!r}" if isinstance(namespace, dict) else "unknown model"
