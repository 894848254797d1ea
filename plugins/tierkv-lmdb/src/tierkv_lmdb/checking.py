"""What ``tierkv check`` says about an LMDB tier. Looks, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from tierkv.abc import Finding
from tierkv_lmdb.options import SLACK_BYTES, LmdbOptions
from tierkv_lmdb.place import LOCK, MANIFEST, foreign_content, lock_holder

_GIB = 1024**3


def check(options: LmdbOptions, capacity_bytes: int | None) -> Iterator[Finding]:
    """Findings on path, permission, free space, what lies there and who uses it."""
    root = options.root
    version = ".".join(map(str, lmdb.version()))
    yield Finding("lmdb", ok=True, detail=f"library {version}, Python binding {lmdb.__version__}")
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    try:
        trouble = _trouble(root, existing)
    except OSError as error:
        trouble = f"{error.filename}: {error.strerror}"
    if trouble:
        yield Finding("path", ok=False, detail=trouble, fix="give an empty or new directory that this user can write")
        return
    yield Finding("path", ok=True, detail=f"{root} {'can be written' if root == existing else 'will be created'}")
    yield _space(root, existing, options, capacity_bytes)
    yield from _owners(root)


def _trouble(root: Path, existing: Path) -> str | None:
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"no permission to write in {existing}"
    return foreign_content(root) if root == existing else None


def _space(root: Path, existing: Path, options: LmdbOptions, capacity_bytes: int | None) -> Finding:
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    if capacity_bytes is None:
        return Finding("space", ok=True, detail=f"no capacity set; {free / _GIB:.1f} GiB free")
    used = sum(file.stat().st_blocks * 512 for file in root.glob("*/data.mdb"))
    wanted = int(capacity_bytes * (1 + options.map_headroom)) + SLACK_BYTES
    detail = (
        f"with its headroom the tier may grow to {wanted / _GIB:.1f} GiB; it has {used / _GIB:.1f} GiB, "
        f"{free / _GIB:.1f} GiB are free"
    )
    fits = wanted <= free + used
    return Finding("space", ok=fits, detail=detail, fix="" if fits else "lower the tier's capacity")


def _owners(root: Path) -> Iterator[Finding]:
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        pid = lock_holder(manifest.parent / LOCK)
        if pid is not None:
            fix = "stop it before another process opens the same namespace; namespaces of other ranks or models may run"
            yield Finding("lock", ok=True, detail=f"{manifest.parent} is in use by process {pid}", fix=fix)
