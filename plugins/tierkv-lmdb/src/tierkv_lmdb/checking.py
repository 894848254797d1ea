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
    yield Finding("lmdb", True, f"library {version}, Python binding {lmdb.__version__}")
    existing = _nearest_existing(root)
    if not existing.is_dir():
        yield Finding("path", False, f"{existing} is not a directory", "give a directory on a local disk")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("path", False, f"no permission to write in {existing}", "change its owner, or give another path")
        return
    trouble = foreign_content(root) if root == existing else None
    if trouble:
        yield Finding("path", False, trouble, "give an empty or new directory")
        return
    yield Finding("path", True, f"{root} " + ("can be written" if root == existing else "will be created"))
    yield _space(existing, options, capacity_bytes, _data_bytes(root))
    yield from _owners(root)


def _nearest_existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _data_bytes(root: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in root.glob("*/data.mdb"))


def _space(place: Path, options: LmdbOptions, capacity_bytes: int | None, used_bytes: int) -> Finding:
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if capacity_bytes is None:
        return Finding("space", True, f"no capacity set; {free / _GIB:.1f} GiB free")
    wanted = int(capacity_bytes * (1 + options.map_headroom)) + SLACK_BYTES
    detail = (
        f"the data file may grow to {wanted / _GIB:.1f} GiB (capacity and headroom); it has {used_bytes / _GIB:.1f} GiB, "
        f"and {free / _GIB:.1f} GiB are free"
    )
    return Finding("space", wanted <= free + used_bytes, detail, "" if wanted <= free + used_bytes else "lower the capacity")


def _owners(root: Path) -> Iterator[Finding]:
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        pid = lock_holder(manifest.parent / LOCK)
        if pid is not None:
            fix = "stop it before another process opens the same namespace; namespaces of other ranks or models may run"
            yield Finding("lock", True, f"{manifest.parent} is in use by process {pid}", fix)
