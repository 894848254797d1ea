"""Local disk tier for tierkv: preallocated segment files, O_DIRECT, and an index log that survives kill -9.

Nouns. A *namespace directory* belongs to one process at a time and holds everything below. A *segment* is a file that
is allocated whole and divided into *pages* of 4 KiB. A *run* is a row of pages in one segment; a frame takes one run,
or several where free space is fragmented. The *table*, in memory, maps each key to its runs. The *index log* is the
history of the table on disk. The *quarantine* lists runs that held a bad frame.

Write. Take free pages, write the frame, and force it to the device. Append a record to the log, and force the log. Then
change the table, free the previous pages, and return. A kill between any two steps leaves the old or the new state.

Read. Look the key up in the table, pin its pages, read them into the caller's buffer, unpin. Pages freed during a read
become free when the last reader has ended.

Open. Lock the namespace directory, read the log, drop entries that contradict the segment files or each other, and
derive the free pages. If the log is missing or damaged, search the unaccounted pages for frames.

Invariants. A record in the log describes a frame that is durable. A page belongs to at most one frame. No lock is held
while a frame is read or written.

Modules: ``options``, ``opening``, ``checking``, ``at_rest``, ``failures``, ``backend``, ``reader`` as in every plugin;
``extents`` (addresses), ``namespace`` (a locked directory), ``open_namespace`` (its verbs), ``gate`` (calls in flight).
Wings: ``directory``, ``segments``, ``space``, ``log``, ``recovery``. Importing this module registers nothing; tierkv
finds it through its entry point and calls the hook.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import AtRest, BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_disk.at_rest import finish_removed, give_up_room, open_reader, remove_stored, stored_namespaces
from tierkv_disk.backend import DiskBackend
from tierkv_disk.checking import check
from tierkv_disk.opening import open_backend
from tierkv_disk.options import DiskOptions

__all__ = ["PLUGIN", "TIERKV_SPI", "DiskBackend", "DiskOptions", "open_backend", "tierkv_backends"]

TIERKV_SPI = 1

CAPABILITIES = Capabilities(
    durable=True,
    authoritative_index=True,
    scan=True,
    keeps_ranks=True,
    reads_end_with_call=True,
    alignment=4096,
    preferred_batch=128,
    preferred_write_bytes=32 << 20,
    preferred_read_bytes=4 << 20,
    spare_share=1 / 16,
    preferred_concurrency=4,
)

PLUGIN = BackendPlugin(
    name="disk",
    summary="local disk: preallocated segment files, O_DIRECT, crash-safe index",
    options=DiskOptions,
    capabilities=CAPABILITIES,
    open=open_backend,
    check=check,
    at_rest=AtRest(stored_namespaces, open_reader, remove_stored, give_up_room, finish_removed),
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """Register the backend ``disk``."""
    return [PLUGIN]
