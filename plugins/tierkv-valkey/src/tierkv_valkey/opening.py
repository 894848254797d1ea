"""Opening a Valkey tier: find its nodes, and see that one answers."""

from __future__ import annotations

from tierkv.abc import BackendContext
from tierkv_valkey.backend import ValkeyBackend
from tierkv_valkey.descriptions import Description
from tierkv_valkey.failures import Failure
from tierkv_valkey.nodes.asking import ask_one
from tierkv_valkey.nodes.cluster import Cluster
from tierkv_valkey.nodes.directory import Directory, SingleServer
from tierkv_valkey.nodes.node import Connector
from tierkv_valkey.nodes.sentinel import SentinelService
from tierkv_valkey.options import ValkeyOptions

PROBE = b"tierkv:probe"


def open_backend(context: BackendContext, options: ValkeyOptions) -> ValkeyBackend:
    """Connect, and look for a name, as every lookup does. The first write stores the description of the namespace.

    Raises:
        TierKVError: as :func:`open_undescribed`.
    """
    return open_undescribed(context, options, Description.of(options.prefix, context.namespace))


def open_undescribed(
    context: BackendContext, options: ValkeyOptions, description: Description | None = None
) -> ValkeyBackend:
    """Connect, and look for a name. Changes nothing.

    Raises:
        BackendUnavailableError, DeadlineExceededError: no server answers.
        BackendError: the server refuses, or runs in another mode; names the remedy.
    """
    directory: Directory | None = None
    try:
        directory = open_directory(options)
        if options.mode != "cluster":  # a cluster has answered, and may lack any one node
            ask_one(directory.node_of(PROBE), options.timeout_s, (b"EXISTS", PROBE))
    except Exception as error:  # noqa: BLE001  any error of the client
        if directory is not None:
            directory.close()
        raise Failure.of(error).to_error(f"cannot open {options.url}", tier=context.tier) from None
    return ValkeyBackend(
        directory,
        prefix=f"{options.prefix}:{context.namespace.fingerprint().hex()}:".encode(),
        tier=context.tier,
        ttl_s=options.ttl_s,
        timeout_s=options.timeout_s,
        description=description,
    )


def open_directory(options: ValkeyOptions) -> Directory:
    """Find the nodes of a tier.

    Raises:
        Exception: any error of the client.
    """
    connector, addresses = Connector(options), options.location.addresses
    if options.mode == "cluster":
        return Cluster(connector, addresses, options.timeout_s)
    if options.mode == "sentinel":
        return SentinelService(connector, addresses, options.service or "", options.timeout_s)
    return SingleServer(connector, addresses[0])
