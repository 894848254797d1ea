"""LMDB as a tier of tierkv: ``backend = "lmdb"`` writes and reads, ``backend = "lmdb-read-only"`` reads beside it.

Nouns. An *environment* is one LMDB data file with its memory map; each namespace has one, in a directory of its own.
It has two databases: ``frames`` (key to frame) and ``index`` (key to transaction id, frame length and rank). The *owner
lock* gives write access to one process; any number of processes may read beside it. The *map* is address space that
doubles when the data file has filled it.

Write. Frames of one call are cut into transactions of bounded size; both databases change in one transaction. With
durability "batch" the call ends with one sync. If the map is full, it grows; if it may not grow, freed pages are
recycled, waiting briefly for readers that still hold them.

Read. Several frames per transaction: look the keys up, then copy the frames from the page cache. If they are not there,
those on adjacent pages are read from the data file by one call, past the page cache.

Open. LMDB trusts its file, so the file is checked first: meta pages, trees, free pages. A damaged namespace starts
empty, with a warning, and counts it.

Heal. LMDB refuses every call after a failed write of a meta page. Such an environment is closed when its last call has
ended, and opened afresh by the next call. After damage the namespace starts empty.

Invariants. No transaction outlives its call. The map is never moved under a transaction. The directory never exceeds
the tier's capacity. Data that was not synced when the machine went down is dropped at the next open.

Modules: ``options``, ``opening``, ``checking``, ``at_rest``, ``failures``, ``backend``, ``reader`` as in every plugin;
``directory`` (names, manifests, owner lock), ``batches`` (transactions of a call), ``frame_reads`` (reads of writer and
readers). Wings: ``environments``
(transactions, the map, and what replaces an environment that cannot go on), ``verification`` (check of the file).
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import AtRest, BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_lmdb.at_rest import finish_removed, open_beside, remove_stored, stored_namespaces
from tierkv_lmdb.checking import check, check_reader
from tierkv_lmdb.frame_reads import READ_BYTES_MAX
from tierkv_lmdb.opening import open_backend, open_reader
from tierkv_lmdb.options import LmdbOptions, LmdbReaderOptions

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
        keeps_ranks=True,
        reads_end_with_call=True,
        preferred_batch=128,  # small frames share a transaction and a sync
        preferred_write_bytes=64 << 20,
        preferred_read_bytes=READ_BYTES_MAX,
        preferred_concurrency=4,  # one copies and checks while others wait for the disk
    ),
    open=open_backend,
    check=check,
    at_rest=AtRest(stored_namespaces, open_beside, remove_stored, finish_removals=finish_removed),
)

READ_ONLY_PLUGIN = BackendPlugin(
    name="lmdb-read-only",
    summary="LMDB tier of another process on this machine, read while that process writes it",
    options=LmdbReaderOptions,
    capabilities=Capabilities(
        shared=True,
        read_only=True,
        reads_end_with_call=True,
        bounded=False,
        preferred_batch=128,
        preferred_read_bytes=READ_BYTES_MAX,
        preferred_concurrency=4,  # one copies and checks while others wait for the disk
    ),
    open=open_reader,
    check=check_reader,
    at_rest=AtRest(stored_namespaces, open_beside),
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """Register ``lmdb`` and ``lmdb-read-only``. They are two, because capabilities must not depend on options."""
    return [PLUGIN, READ_ONLY_PLUGIN]


__all__ = ["PLUGIN", "READ_ONLY_PLUGIN", "TIERKV_SPI", "LmdbOptions", "LmdbReaderOptions", "tierkv_backends"]
