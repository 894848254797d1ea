"""Opening an LMDB tier: claim the directory, lock the namespace, open the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lmdb

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, NamespaceMismatchError, TierKVError
from tierkv_lmdb.backend import LmdbBackend
from tierkv_lmdb.directory import (
    LOCK,
    UNSYNCED,
    OwnerLock,
    boot_id,
    claim_namespace,
    claim_root,
    drop_unsynced_data,
    require_root,
    sync_directory,
    write_durably,
)
from tierkv_lmdb.environment import DATA_FILE, DATABASES, Environment
from tierkv_lmdb.failures import Failures, unusable_path
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions, Sizes
from tierkv_lmdb.reader import LmdbReader

_log = logging.getLogger(__name__)


def open_backend(context: BackendContext, options: LmdbOptions) -> LmdbBackend:
    """Open, or create, the environment of one namespace.

    Raises:
        NamespaceMismatchError: the path holds other files, another layout or another namespace.
        BackendUnavailableError: another process has this namespace open; names its pid.
        BackendError: the path cannot be used or the data is damaged; names the remedy.
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
        raise unusable_path(error, Path(error.filename or options.root), options.root, context.tier) from error


def open_reader(context: BackendContext, options: LmdbReaderOptions) -> LmdbReader:
    """Open a reader of one namespace. Its data may still be missing, and its writer may still be starting.

    Raises:
        NamespaceMismatchError: the path holds other files, another layout or another namespace.
        BackendError: the path cannot be used.
    """
    directory = options.root / context.namespace.fingerprint().hex()
    reader = LmdbReader(directory, context.namespace, Failures(context.tier, directory), context.tier)
    try:
        require_root(options.root)
        reader.contains([])
    except NamespaceMismatchError as error:
        error.tier = context.tier
        raise
    except BackendError as error:
        _log.warning("tier %s cannot be read yet: %s", context.tier, error)
    except OSError as error:
        raise BackendError(
            f"{options.root}: cannot be used ({error}). Give the path of an LMDB tier that this user can read",
            tier=context.tier,
        ) from error
    return reader


def _open_locked(directory: Path, lock: OwnerLock, context: BackendContext, options: LmdbOptions) -> LmdbBackend:
    claim_namespace(directory, context.namespace)
    drop_unsynced_data(directory)
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
    _keep_freed_memory(sizes.transaction_bytes)
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


def _keep_freed_memory(transaction_bytes: int) -> None:
    """Make malloc keep the memory of a transaction for the next one: fresh memory costs a page fault per page.

    LMDB allocates the pages of a transaction with malloc. glibc returns free memory to the system beyond twice the
    longest block that was ever mapped and freed. Freeing one long block raises that bound. Other systems ignore this.
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
            # With "batch" a call syncs once more at its end. Until then a crash may undo, but never damage.
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
    """Restore the length of a truncated data file: reading zeros is an error, reading past its end a SIGBUS."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if data.stat().st_size < needed:
        os.truncate(data, needed)


def _damaged(directory: Path, error: lmdb.Error) -> BackendError:
    return BackendError(
        f"{directory}: LMDB cannot open its data ({error}). It is a cache: remove this directory to start empty"
    )
