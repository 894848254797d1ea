"""Valkey or Redis as a tier of tierkv: ``backend = "valkey"``. One server, Sentinel or Cluster; shared by all engines.

Nouns. A *node* is one server with its connections (wing ``nodes``). A *directory* of nodes finds the node of a
name: the only one, the primary that sentinels name, or the owner of a cluster's slot. A *name* is the server's key of
one frame: ``<prefix>:<fingerprint>:<chunk key in hex>``. It has no hash tag, so a prompt spreads over all slots.

Flow. A call groups its keys by node. It sends one pipeline to each node, and then reads the replies of each. A reply
that names another node (MOVED, ASK) sends its key there in the next round. Frames are sent from
the caller's memory, and read straight into it.

Failures. The client retries nothing: the framework does, within its deadline. Connecting and waiting have timeouts
below that deadline. A node that did not answer in time rests for a moment: its keys fail at once, and the keys of other
nodes are served.

At rest. ``<prefix>:namespace:<fingerprint>`` describes a namespace for tools. They list chunks with SCAN, node by node
and page by page.

Invariants. Nothing outside ``<prefix>:`` is touched. A server may forget a frame at any time; that is a
miss. Credentials come from the environment and never appear in a message.

Modules: ``options``, ``opening``, ``checking``, ``failures``, ``at_rest``, ``backend`` as in every plugin;
``descriptions`` for what a namespace says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import AtRest, BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_valkey.at_rest import open_beside, remove_stored, stored_namespaces
from tierkv_valkey.checking import check
from tierkv_valkey.opening import open_backend
from tierkv_valkey.options import ValkeyOptions

__version__ = "0.1.0"
TIERKV_SPI = 1

PLUGIN = BackendPlugin(
    name="valkey",
    summary="Valkey or Redis: one server, Sentinel or Cluster; shared by all engines, may forget",
    options=ValkeyOptions,
    capabilities=Capabilities(
        shared=True,
        bounded=False,
        reads_end_with_call=True,
        preferred_batch=32,
        preferred_read_bytes=2 << 20,
        preferred_write_bytes=8 << 20,
        preferred_concurrency=4,
    ),
    open=open_backend,
    check=check,
    at_rest=AtRest(stored_namespaces, open_reader=open_beside, remove_namespace=remove_stored),
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """Register ``valkey``."""
    return [PLUGIN]


__all__ = ["PLUGIN", "TIERKV_SPI", "ValkeyOptions", "tierkv_backends"]
