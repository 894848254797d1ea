"""Checks of an fsspec tier for ``tierkv check``.

Only a write shows whether an object store may be written: a short object with a unique name is stored and deleted.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from tierkv.abc import CheckResult
from tierkv.abc.places import check_private_directory, exists, why_not_writable
from tierkv.errors import BackendError
from tierkv.types.sizes import round_size
from tierkv_fsspec.credentials import find_credentials
from tierkv_fsspec.failures import FIXES, Failure, FailureKind
from tierkv_fsspec.lifecycle import check_lifecycle
from tierkv_fsspec.options import CHAINS, READ_ONLY_PROTOCOLS, FsspecOptions, Location
from tierkv_fsspec.stores.selection import StoreChoice, choose_store
from tierkv_fsspec.stores.store import Store

READ_ONLY_FIX = (
    f'{FIXES[FailureKind.REFUSED]}; or set backend = "fsspec-read-only" and write = "read_only" for this tier'
)


def check(options: FsspecOptions, _capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check package, credentials, reachability, permission to write, and the bucket's lifecycle rules."""
    if options.location.protocol in READ_ONLY_PROTOCOLS:
        fix = 'use backend = "fsspec-read-only"'
        yield CheckResult("write", ok=False, detail="http URLs are never written", fix=fix)
        return
    yield from _check(options, writes=True)


def check_reader(options: FsspecOptions, _capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check package, credentials and reachability."""
    yield from _check(options, writes=False)


def _check(options: FsspecOptions, *, writes: bool) -> Iterator[CheckResult]:
    location = options.location
    try:
        choice = choose_store(options)
    except BackendError as error:
        yield CheckResult("package", ok=False, detail=str(error), fix="install one of the packages named")
        return
    yield CheckResult("package", ok=True, detail=f"{location.url} is served by {choice.detail}")
    if location.protocol == "file":
        yield from _check_directory(Path(location.prefix), writes=writes)
        return
    if location.protocol == "memory":
        yield CheckResult("durable", ok=True, detail="memory URLs are for trials: the data ends with the process")
    credentials = find_credentials(location.protocol)
    if credentials is not None and not options.storage_options.get("anon"):
        yield CheckResult("credentials", credentials.found, credentials.detail, "" if credentials.found else CHAINS)
        if not credentials.found:
            return
    is_open = True
    for result in _check_access(choice, location, writes=writes):
        is_open &= result.ok
        yield result
    if is_open and writes and location.protocol == "s3":
        yield check_lifecycle(location, options)


def _check_access(choice: StoreChoice, location: Location, *, writes: bool) -> Iterator[CheckResult]:
    try:
        store = choice.open(location)
        try:
            store.read(f"tierkv-check-{uuid.uuid4().hex}")
        except FileNotFoundError as error:
            if Failure.of(error).kind is FailureKind.NO_BUCKET:
                raise
    except Exception as error:  # noqa: BLE001  the check reports any error of a storage library
        failure = Failure.of(error)
        yield CheckResult(
            "access", ok=False, detail=f"{failure.kind.value} ({failure.detail})", fix=FIXES[failure.kind]
        )
        return
    yield CheckResult("access", ok=True, detail=f"{location.url} answers")
    if writes:
        yield _check_write(store)


def _check_write(store: Store) -> CheckResult:
    name = f"tierkv-check-{uuid.uuid4().hex}"
    try:
        store.write(name, memoryview(b"tierkv check"))
        store.delete(name)
    except Exception as error:  # noqa: BLE001  the check reports any error of a storage library
        failure = Failure.of(error)
        fix = READ_ONLY_FIX if failure.kind is FailureKind.REFUSED else FIXES.get(failure.kind, "")
        return CheckResult("write", ok=False, detail=f"read-only: {failure.kind.value} ({failure.detail})", fix=fix)
    return CheckResult("write", ok=True, detail="a short object was stored and removed")


def _check_directory(root: Path, *, writes: bool) -> Iterator[CheckResult]:
    existing = next(path for path in (root, *root.parents) if exists(path))
    if not existing.is_dir():
        yield CheckResult("access", ok=False, detail=f"{existing} is not a directory", fix="give another path")
        return
    if not writes:
        there = root == existing
        fix = "" if there else f"make {root} or mount it, or correct the tier's url"
        yield CheckResult("access", ok=there, detail=f"{root} {'is there' if there else 'does not exist'}", fix=fix)
        return
    if root == existing:
        try:
            check_private_directory(root, "url")
        except BackendError as error:
            fix = "give a directory that only this user can change"
            yield CheckResult("access", ok=False, detail=str(error), fix=fix)
            return
    if why := why_not_writable(existing):
        yield CheckResult("write", ok=False, detail=why, fix=READ_ONLY_FIX)
        return
    yield CheckResult("write", ok=True, detail=f"{root} {'can be written' if root == existing else 'will be created'}")
    disk = os.statvfs(existing)
    free = disk.f_bavail * disk.f_frsize
    yield CheckResult("space", ok=free > 0, detail=f"{round_size(free)} free", fix="" if free > 0 else "make room")
