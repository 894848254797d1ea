"""LMDB as a tier of tierkv: ``backend = "lmdb"`` writes and reads, ``backend = "lmdb_reader"`` reads beside it."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_lmdb.checking import check, check_reader
from tierkv_lmdb.opening import open_backend
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions
from tierkv_lmdb.reader import open_reader

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
        preferred_read_batch=1,
        preferred_concurrency=2,
    ),
    open=open_backend,
    check=check,
)

READER = BackendPlugin(
    name="lmdb_reader",
    summary="an LMDB tier that another process on this machine writes: read it while it changes",
    options=LmdbReaderOptions,
    capabilities=Capabilities(
        shared=True,
        read_only=True,
        bounded=False,
        preferred_batch=8,
        preferred_read_batch=1,
        preferred_concurrency=2,
    ),
    open=open_reader,
    check=check_reader,
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """The writer and its readers: what a backend can do must not depend on its options, so they are two."""
    return [PLUGIN, READER]


__all__ = ["PLUGIN", "READER", "TIERKV_SPI", "LmdbOptions", "LmdbReaderOptions", "tierkv_backends"]
