"""LMDB as a tier of tierkv: ``backend = "lmdb"``."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_lmdb.checking import check
from tierkv_lmdb.opening import open_backend
from tierkv_lmdb.options import LmdbOptions

__version__ = "0.1.0"
TIERKV_SPI = 1

PLUGIN = BackendPlugin(
    name="lmdb",
    summary="LMDB on a local disk: memory-mapped reads, one writer process, crash-safe",
    options=LmdbOptions,
    capabilities=Capabilities(
        durable=True,
        authoritative_index=True,
        scan=True,
        preferred_batch=8,
        preferred_concurrency=2,
    ),
    open=open_backend,
    check=check,
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """The one backend of this distribution."""
    return [PLUGIN]


__all__ = ["PLUGIN", "TIERKV_SPI", "LmdbOptions", "tierkv_backends"]
