"""From options to an open backend."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, TierKVError
from tierkv_lmdb.backend import LmdbBackend
from tierkv_lmdb.environment import DATA_FILE, DATABASES, Environment
from tierkv_lmdb.failures import Failures
from tierkv_lmdb.options import LmdbOptions, Sizes
from tierkv_lmdb.place import (
    LOCK,
    UNSYNCED,
    OwnerLock,
    backend_error,
    boot_id,
    claim_namespace,
    claim_root,
    drop_data_of_another_boot,
    sync_directory,
    write_durably,
)


def open_backend(context: BackendContext, options: LmdbOptions) -> LmdbBackend:
    """Open, or create, the environment of one namespace.

    Raises:
        NamespaceMismatchError: the path holds something else, another layout or another namespace.
        BackendUnavailableError: another process has this namespace open; names its pid.
        BackendError: the path cannot be used or the data is damaged; says what to do.
    """
    directory = options.root / context.namespace.fingerprint().hex()
    try:
        claim_root(options.root)
        directory.mkdir(exist_ok=True)
        lock = OwnerLock.take(directory / LOCK)
        try:
            return _open_locked(directory, lock, context, options)
        except BaseException:
            lock.release()
            raise
    except TierKVError as error:
        error.tier = context.tier
        raise
    except OSError as error:
        raise backend_error(error, Path(error.filename or options.root), options.root, context.tier) from error


def _open_locked(directory: Path, lock: OwnerLock, context: BackendContext, options: LmdbOptions) -> LmdbBackend:
    claim_namespace(directory, context.namespace)
    drop_data_of_another_boot(directory)
    if options.durability == "none":
        write_durably(directory / UNSYNCED, boot_id())
    sizes = _sizes(directory, context, options)
    env = _open_environment(directory, sizes, options)

    def release(*, synced: bool) -> None:
        if synced:
            (directory / UNSYNCED).unlink(missing_ok=True)
        lock.release()

    try:
        if options.durability != "none" and (directory / UNSYNCED).exists():
            env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
            (directory / UNSYNCED).unlink()
        env.reader_check()
        sync_directory(directory)
        environment = Environment(
            env, name=context.tier, map_bytes_max=sizes.map_bytes_max, read_only=False, release=release
        )
    except lmdb.Error as error:
        env.close()
        raise _damaged(directory, error) from error
    except BaseException:
        env.close()
        raise
    keep_freed_memory(sizes.transaction_bytes)
    failures = Failures(context.tier, directory)
    return LmdbBackend(environment, failures, sizes, sync_calls=options.durability == "batch")


def _sizes(directory: Path, context: BackendContext, options: LmdbOptions) -> Sizes:
    data = directory / DATA_FILE
    disk = os.statvfs(directory)
    try:
        return Sizes.of(
            options,
            disk.f_blocks * disk.f_frsize if context.capacity_bytes is None else context.capacity_bytes,
            frame_bytes_max=context.frame_bytes_max,
            file_bytes=data.stat().st_size if data.exists() else 0,
            page_bytes=os.sysconf("SC_PAGESIZE"),
        )
    except ValueError as error:
        raise BackendError(f"{directory}: {error}") from error


def keep_freed_memory(transaction_bytes: int) -> None:
    """Let malloc keep what a transaction gives back, for the next one: fresh memory costs a page fault per page.

    LMDB makes the pages of a transaction with malloc. glibc gives memory back to the system beyond twice the longest
    block that it ever mapped for itself and got back; so it gets one back. Elsewhere this does nothing.
    """
    memory = bytearray(transaction_bytes)
    del memory


def _open_environment(directory: Path, sizes: Sizes, options: LmdbOptions) -> lmdb.Environment:
    try:
        env = lmdb.open(
            str(directory),
            map_size=sizes.map_bytes,
            max_dbs=len(DATABASES),
            mode=0o600,
            sync=options.durability != "none",
            # With "batch" a call syncs once more at its end; until then a crash may undo, but never damage.
            metasync=options.durability == "always",
        )
    except lmdb.MemoryError as error:
        raise BackendError(
            f"{directory}: cannot map {sizes.map_bytes} bytes of address space ({error}). Raise the limit on virtual "
            f"memory (ulimit -v)"
        ) from error
    except lmdb.Error as error:
        raise _damaged(directory, error) from error
    _fill_up(env, directory / DATA_FILE)
    return env


def _fill_up(env: lmdb.Environment, data: Path) -> None:
    """Give a data file that was cut short its length back: reading zeros is an error, reading past the end a SIGBUS."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if data.stat().st_size < needed:
        os.truncate(data, needed)


def _damaged(directory: Path, error: lmdb.Error) -> BackendError:
    return BackendError(
        f"{directory}: LMDB cannot open its data ({error}). It is a cache: remove this directory to start empty"
    )
