"""Checks of an LMDB tier for ``tierkv check``. They change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tierkv.abc import CheckResult
from tierkv.abc.places import check_private_directory, exists, why_not_writable
from tierkv.errors import BackendError
from tierkv.types.sizes import round_size
from tierkv_lmdb.directory import LOCK, LOSSES, MANIFEST, foreign_content, lock_holder, read_losses
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions

_CONTAINMENT = CheckResult(
    "process",
    ok=True,
    detail="LMDB runs in the engine's process: files that are damaged or truncated while open can end it (SIGBUS, "
    'SIGSEGV, abort). Where that must not happen, use backend = "disk"',
)


def check(options: LmdbOptions, capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check library, path, permission, free space, and which processes use the directory."""
    root = options.root
    version = ".".join(map(str, lmdb.version()))
    yield CheckResult("lmdb", ok=True, detail=f"library {version}, Python binding {lmdb.__version__}")
    yield _CONTAINMENT
    existing = next(path for path in (root, *root.absolute().parents) if exists(path))
    try:
        trouble = _trouble(root, existing)
    except OSError as error:
        trouble = f"{error.filename}: {error.strerror}"
    if trouble:
        yield CheckResult(
            "path", ok=False, detail=trouble, fix="give an empty or new directory that this user can write"
        )
        return
    yield CheckResult("path", ok=True, detail=f"{root} {'can be written' if root == existing else 'will be created'}")
    yield _space(root, existing, capacity_bytes)
    yield from _losses(root)
    yield from _owners(root)


def check_reader(options: LmdbReaderOptions, capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check path, permissions, and which process writes there."""
    del capacity_bytes  # concerns the writer alone
    yield _CONTAINMENT
    root = options.root
    if not exists(root):
        fix = 'start the process whose tier has backend = "lmdb" and this path, or correct the path'
        yield CheckResult(
            "path", ok=False, detail=f"{root} does not exist; until it does, each chunk is a miss", fix=fix
        )
        return
    try:
        trouble = _reader_trouble(root)
    except OSError as error:
        trouble = f"{error.filename}: {error.strerror}"
    fix = "give the path of an LMDB tier, and run as the user that writes it: LMDB's readers write to its lock.mdb"
    yield CheckResult("path", ok=not trouble, detail=trouble or f"{root} can be read", fix=fix if trouble else "")
    if not trouble:
        yield from _owners(root, "it is the writer; nothing to do")


def _reader_trouble(root: Path) -> str | None:
    if not root.is_dir():
        return f"{root} is not a directory"
    trouble = foreign_content(root)
    if trouble:
        return trouble
    locked = (lock for lock in root.glob("*/lock.mdb") if not os.access(lock, os.R_OK | os.W_OK))
    return next((f"no permission to write {lock}" for lock in locked), None)


def _trouble(root: Path, existing: Path) -> str | None:
    if trouble := why_not_writable(existing):
        return trouble
    if root != existing:
        return None
    try:
        check_private_directory(root)
    except BackendError as error:
        return str(error)
    return foreign_content(root)


def _space(root: Path, existing: Path, capacity_bytes: int | None) -> CheckResult:
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    if capacity_bytes is None:
        return CheckResult("space", ok=True, detail=f"no capacity set; {round_size(free)} free")
    used = sum(file.stat().st_blocks * 512 for file in root.glob("*/data.mdb"))
    detail = (
        f"the tier may grow to {round_size(capacity_bytes)}; it has {round_size(used)}, {round_size(free)} are free"
    )
    fits = capacity_bytes <= free + used
    return CheckResult("space", ok=fits, detail=detail, fix="" if fits else "lower the tier's capacity")


def _losses(root: Path) -> Iterator[CheckResult]:
    for file in sorted(root.glob(f"*/{LOSSES}")):
        count, reason = read_losses(file.parent)
        times = "once" if count == 1 else f"{count} times"
        yield CheckResult(
            "damage",
            ok=False,
            detail=f"{file.parent} started empty {times}; last reason: {reason}",
            fix=f"check the health of this disk and its file system; then remove {file}",
        )


def _owners(root: Path, fix: str = "") -> Iterator[CheckResult]:
    fix = fix or "stop it before another process opens the same namespace; those of other ranks or models may run"
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        pid = lock_holder(manifest.parent / LOCK)
        if pid is not None:
            yield CheckResult("lock", ok=True, detail=f"{manifest.parent} is written by process {pid}", fix=fix)
