"""Directory of nodes: the node of a name. This module has the interface, and the directory of a single server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from redis.exceptions import AskError

from tierkv_valkey.nodes.node import Connector, Node
from tierkv_valkey.options import Address


class Directory(Protocol):
    """Nodes of a tier. All methods may be called on any thread."""

    def node_of(self, name: bytes, /) -> Node:
        """Return the node that has a name.

        Raises:
            redis.exceptions.RedisError, OSError: no node is known for it.
        """

    def follow(self, redirect: AskError, /) -> Node | None:
        """Return the node that a reply names, or None where no other node can be meant."""

    def note_failure(self, node: Node, /) -> None:
        """Note that a node failed, so that the next call looks for its successor."""

    def others_serve(self, node: Node, command: bytes = b"", /) -> bool:
        """Whether other nodes with data serve, and have answered since this one began to fail or to refuse."""

    def nodes(self) -> Sequence[Node]:
        """All nodes that have data."""

    def close(self) -> None:
        """Close the connections of all nodes."""


class SingleServer:
    """Directory of one server."""

    def __init__(self, connector: Connector, address: Address) -> None:
        self._node = connector.node(address)

    def node_of(self, _name: bytes) -> Node:
        """Return the server."""
        return self._node

    def follow(self, _redirect: AskError) -> Node | None:
        """Return None: the server is a node of a cluster, and the tier's mode is wrong."""
        return None

    def note_failure(self, _node: Node) -> None:
        """Do nothing: there is no other server."""

    def others_serve(self, _node: Node, _command: bytes = b"") -> bool:
        """Return False: there is no other server."""
        return False

    def nodes(self) -> Sequence[Node]:
        """Return the server."""
        return [self._node]

    def close(self) -> None:
        """Close its connections."""
        self._node.close()
