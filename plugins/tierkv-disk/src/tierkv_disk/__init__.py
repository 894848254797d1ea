"""Local disk tier for tierkv: preallocated segment files, O_DIRECT, and an index log that survives kill -9.

Importing this registers nothing by itself: tierkv finds the module through its entry point and calls the hook.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import BackendContext, BackendPlugin, Capabilities
from tierkv.errors import TierKVError
from tierkv.hookspecs import hookimpl
from tierkv_disk.backend import DiskBackend
from tierkv_disk.checking import check
from tierkv_disk.failures import as_tier_error
from tierkv_disk.home import enter_home
from tierkv_disk.options import DiskOptions

__all__ = ["PLUGIN", "TIERKV_SPI", "DiskBackend", "DiskOptions", "open_backend", "tierkv_backends"]

TIERKV_SPI = 1

CAPABILITIES = Capabilities(
    durable=True,
    authoritative_index=True,
    scan=True,
    alignment=4096,
    preferred_batch=16,
    preferred_concurrency=4,
    preferred_read_batch=4,
)


def open_backend(context: BackendContext, options: DiskOptions) -> DiskBackend:
    """Open the disk tier of a namespace.

    Raises:
        ConfigError: capacity or options cannot work.
        BackendError: the place cannot be used, is somebody else's, or is in use; the message says which and what to do.
    """
    try:
        home = enter_home(context, options)
        try:
            return DiskBackend(home)
        except BaseException:
            home.release()
            raise
    except TierKVError as error:
        error.tier = context.tier
        raise
    except OSError as error:
        what = f"cannot use {options.path} (`path` must be a directory on a healthy disk that this user may write)"
        raise as_tier_error(error, what, tier=context.tier) from error


PLUGIN = BackendPlugin(
    name="disk",
    summary="local disk: preallocated segment files, O_DIRECT, crash-safe index",
    options=DiskOptions,
    capabilities=CAPABILITIES,
    open=open_backend,
    check=check,
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """Register the backend ``disk``."""
    return [PLUGIN]
