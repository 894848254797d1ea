"""Directory of a cluster: 16,384 slots, each with the node that owns it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from tierkv_valkey.nodes.asking import first_answer
from tierkv_valkey.nodes.node import Connector, Node
from tierkv_valkey.nodes.replies import Reply
from tierkv_valkey.options import PORT_MAX, Address

REFRESH_S = 0.5
"""Shortest time between two questions for the owners of all slots."""
SLOTS = (b"CLUSTER", b"SLOTS")


def slot_ranges(reply: Reply) -> Iterator[tuple[int, int, str, int]]:
    """Yield first and last slot of each range in the reply to :data:`SLOTS`, and host and port of its owner.

    Raises:
        ResponseError: it is no such reply.
    """
    try:
        for first, last, (host, port, *_), *_ in cast("list[Any]", reply):
            if not (0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS and 0 < port <= PORT_MAX):
                raise ValueError(f"slots {first} to {last} at port {port}")  # noqa: TRY301  as other faults of a reply
            yield first, last, host.decode() if host else "", port
    except (AttributeError, TypeError, ValueError) as error:
        raise ResponseError(f"the reply to CLUSTER SLOTS is not understood: {error}") from None


class Cluster:
    """Directory of a cluster. It is asked at the start, after a node failed, and after a slot has moved.

    Args:
        connector: makes nodes.
        seeds: some nodes of the cluster.
        timeout_s: seconds for an answer.
        clock: seconds, for the time between refreshes.

    Raises:
        redis.exceptions.RedisError, OSError: no seed answers, or the first that does is no node of a cluster.
    """

    def __init__(
        self,
        connector: Connector,
        seeds: Sequence[Address],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._seeds = tuple(seeds)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()  # guards the tables
        self._refreshing = threading.Lock()  # held by the one thread that asks
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._serving: Sequence[Node] = ()  # the owners, each once
        self._is_stale = False
        self._refreshed_s = 0.0
        self._closed = False
        self._refresh()

    def node_of(self, name: bytes) -> Node:
        """Return the owner of a name's slot.

        Raises:
            ClusterDownError: no node owns it.
        """
        if self._is_stale:
            self._refresh_if_due()
        slot: int = key_slot(name)
        owner = self._owners[slot]
        if owner is None:
            self._is_stale = True
            raise ClusterDownError(f"no node serves slot {slot}")
        return owner

    def follow(self, redirect: AskError) -> Node:
        """Return the node that a reply names. A slot that has moved stays with that node."""
        node = self._known(Address(*redirect.node_addr))
        if isinstance(redirect, MovedError):
            self._owners[redirect.slot_id] = node
            self._is_stale = True  # slots rarely move alone
        return node

    def note_failure(self, node: Node) -> None:
        """Ask for the owners before the next call: a replica may have taken over."""
        self._is_stale = True
        if self.others_serve(node):
            node.note_away()

    def others_serve(self, node: Node, command: bytes = b"") -> bool:
        """Whether another owner of slots serves: it has answered since this one began to fail, and does not fail."""
        since_s = node.does_not_serve_since(command)
        if since_s is None:
            return False
        others = (other for other in self._serving if other is not node)
        return any(other.does_not_serve_since(command) is None and other.answered_s > since_s for other in others)

    def nodes(self) -> Sequence[Node]:
        """All owners of slots."""
        return list({id(node): node for node in self._owners if node is not None}.values())

    def close(self) -> None:
        """Close the connections of all nodes."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def _refresh_if_due(self) -> None:
        if self._clock() < self._refreshed_s + REFRESH_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._is_stale = False
            self._refresh()
        except Exception:  # noqa: BLE001  the known owners stay in use; each failure is one of their keys
            self._is_stale = True
        finally:
            self._refreshing.release()

    def _refresh(self) -> None:
        asked = [*self.nodes(), *(self._known(seed) for seed in self._seeds)]
        try:
            node, reply = first_answer(list(dict.fromkeys(asked)), self._timeout_s, SLOTS)
        finally:
            self._refreshed_s = self._clock()
        owners: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, host, port in slot_ranges(reply):
            owner = self._known(Address(host or node.address.host, port))  # an empty host: the one that was asked
            owners[first : last + 1] = [owner] * (last + 1 - first)
        self._owners = owners
        self._serving = self.nodes()
        self._drop_all_but({*self.nodes(), *(self._known(seed) for seed in self._seeds)})

    def _known(self, address: Address) -> Node:
        with self._lock:
            if address not in self._nodes:
                self._nodes[address] = self._connector.node(address)
                if self._closed:
                    self._nodes[address].close()
            return self._nodes[address]

    def _drop_all_but(self, kept: set[Node]) -> None:
        with self._lock:
            gone = [node for node in self._nodes.values() if node not in kept]
            self._nodes = {address: node for address, node in self._nodes.items() if node in kept}
        for node in gone:
            node.close()
