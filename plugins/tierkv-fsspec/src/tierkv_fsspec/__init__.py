"""Object stores and shared file systems as a tier of tierkv: ``backend = "fsspec"``, or ``"fsspec-read-only"``.

Nouns. A *store* maps names to byte strings (wing ``stores``: directories, obstore, fsspec). An *object* holds one
frame; its name is a digest of the key. The *manifest* is one object per namespace that describes it. *Presence hints*
are names that were listed at open, and names that were absent at a recent lookup.

Lookup. Names listed at open count as present once; all other keys cost one request each. Write. A frame absent at a
recent lookup is created with a conditional request. Otherwise it is compared with the stored object and written if it
differs. Read. One request fetches the object whole. The requests of one call run side by side, up to
``concurrent_requests`` over all calls.

Sharing. Any number of engines read and write one namespace without locks: a frame is a function of its key, so writing
it twice does no harm. Hints may be wrong at any time; they cost a miss or a refused upload, never wrong data.

Invariants. A namespace is written only after its manifest was written or found equal. Credentials come from the
environment and never appear in a message. Objects outside the namespace are never touched.

Modules: ``options``, ``opening``, ``checking``, ``at_rest``, ``failures``, ``backend``, ``reader`` as in every plugin;
``manifest``, ``presence_hints``, ``credentials`` and ``lifecycle`` (both for ``checking``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tierkv.abc import AtRest, BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_fsspec.at_rest import open_beside, remove_stored, stored_namespaces
from tierkv_fsspec.checking import check, check_reader
from tierkv_fsspec.opening import open_backend, open_reader
from tierkv_fsspec.options import FsspecOptions

__version__ = "0.1.0"
TIERKV_SPI = 1

PLUGIN = BackendPlugin(
    name="fsspec",
    summary="Any fsspec URL: a shared directory, S3, Google Cloud Storage, Azure; shared by all processes",
    options=FsspecOptions,
    capabilities=Capabilities(
        durable=True,
        shared=True,
        bounded=False,
        # Buffers are filled by copies, or by blocking calls, on threads of the backend, and each call waits for all.
        reads_end_with_call=True,
        preferred_batch=8,
        preferred_concurrency=4,
    ),
    open=open_backend,
    check=check,
    at_rest=AtRest(stored_namespaces, open_beside, remove_stored),
)

READ_ONLY_PLUGIN = dataclasses.replace(
    PLUGIN,
    name="fsspec-read-only",
    summary="Any fsspec URL, and http URLs, for engines that only read what other engines store",
    capabilities=dataclasses.replace(PLUGIN.capabilities, read_only=True),
    open=open_reader,
    check=check_reader,
    at_rest=AtRest(stored_namespaces, open_beside),
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """Register ``fsspec`` and ``fsspec-read-only``."""
    return [PLUGIN, READ_ONLY_PLUGIN]


__all__ = ["PLUGIN", "READ_ONLY_PLUGIN", "TIERKV_SPI", "FsspecOptions", "tierkv_backends"]
