"""From options to an open backend."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, TierKVError
from tierkv_lmdb.backend import DATABASES, LmdbBackend
from tierkv_lmdb.options import LmdbOptions, MapSizes
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
    sizes = _map_sizes(directory, context, options)
    env = _open_environment(directory, sizes, options)

    def release(*, synced: bool) -> None:
        if synced:
            (directory / UNSYNCED).unlink(missing_ok=True)
        lock.release()

    try:
        if options.durability == "batch" and (directory / UNSYNCED).exists():
            env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
            (directory / UNSYNCED).unlink()
        env.reader_check()
        sync_directory(directory)
        return LmdbBackend(
            env,
            tier=context.tier,
            frames_bytes_max=sizes.frames_bytes_max,
            sync_writes=options.durability == "batch",
            release=release,
        )
    except lmdb.Error as error:
        env.close()
        raise _damaged(directory, error) from error
    except BaseException:
        env.close()
        raise


def _map_sizes(directory: Path, context: BackendContext, options: LmdbOptions) -> MapSizes:
    data = directory / "data.mdb"
    disk = os.statvfs(directory)
    return MapSizes.of(
        options,
        context.capacity_bytes,
        frame_bytes_max=context.frame_bytes_max,
        file_bytes=data.stat().st_size if data.exists() else 0,
        disk_bytes=disk.f_blocks * disk.f_frsize,
    )


def _open_environment(directory: Path, sizes: MapSizes, options: LmdbOptions) -> lmdb.Environment:
    try:
        env = lmdb.open(
            str(directory),
            map_size=sizes.map_bytes,
            max_dbs=len(DATABASES),
            mode=0o600,
            sync=options.durability == "batch",
            metasync=False,  # the backend syncs once per call; until then a crash may undo, but never damage
        )
    except lmdb.MemoryError as error:
        raise BackendError(
            f"{directory}: cannot map {sizes.map_bytes} bytes of address space ({error}). Lower the tier's capacity or "
            f"raise the limit on virtual memory (ulimit -v)"
        ) from error
    except lmdb.Error as error:
        raise _damaged(directory, error) from error
    _fill_up(env, directory / "data.mdb")
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
