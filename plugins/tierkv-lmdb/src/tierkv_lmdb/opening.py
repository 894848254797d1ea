"""Opening an LMDB tier: claim the directory, lock the namespace, open the environment."""

from __future__ import annotations

from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import make_private_directory, mount_point_of
from tierkv.errors import BackendError, NamespaceMismatchError, TierKVError
from tierkv_lmdb.backend import LmdbBackend
from tierkv_lmdb.directory import (
    LOCK,
    UNSYNCED,
    OwnerLock,
    claim_namespace,
    claim_root,
    drop_unsynced_data,
    require_root,
)
from tierkv_lmdb.environments.keeper import EnvironmentKeeper
from tierkv_lmdb.environments.opener import EnvironmentOpener
from tierkv_lmdb.failures import Failures, unusable_path
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions
from tierkv_lmdb.reader import LmdbReader

_log = plugin_logger(__name__)


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
        if directory.is_symlink():
            raise BackendError(f"{directory} is a link, and this tier writes in its own `path` only: move it there")
        make_private_directory(directory)
        lock = OwnerLock.take(directory / LOCK, is_use=context.counts_as_use)
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

    def release(*, synced: bool) -> None:
        try:
            if synced and lock.is_at(directory / LOCK):
                (directory / UNSYNCED).unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "tier %s: %s: after a crash of the machine it starts empty: %s", context.tier, directory, error
            )
        finally:
            lock.release()

    opener = EnvironmentOpener(directory, lock, context, options, mount_point_of(directory))
    keeper = EnvironmentKeeper(context.tier, opener, release)
    sizes = opener.sizes()
    _keep_freed_memory(sizes.transaction_bytes)
    failures = Failures(context.tier, directory)
    return LmdbBackend(keeper, failures, sizes, sync_calls=options.durability == "batch")


def _keep_freed_memory(transaction_bytes: int) -> None:
    """Make malloc keep the memory of a transaction for the next one: fresh memory costs a page fault per page.

    LMDB allocates the pages of a transaction with malloc. glibc returns free memory to the system beyond twice the
    longest block that was ever mapped and freed. Freeing one long block raises that bound. Other systems ignore this.
    """
    memory = bytearray(transaction_bytes)
    del memory
