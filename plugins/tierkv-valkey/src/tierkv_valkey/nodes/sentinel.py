"""Directory of a primary with replicas, as sentinels watch them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from redis.exceptions import AskError, MasterDownError, ResponseError

from tierkv_valkey.nodes.asking import first_answer
from tierkv_valkey.nodes.node import Connector, Node
from tierkv_valkey.nodes.replies import Reply
from tierkv_valkey.options import PORT_MAX, Address

REFRESH_S = 0.5
"""Shortest time between two questions for the primary."""


def address_in(reply: Reply) -> Address:
    """Return the address in a sentinel's answer.

    Raises:
        ResponseError: it is none.
    """
    try:
        host, port = cast("list[bytes]", reply)
        address = Address(host.decode(), int(port))
    except (AttributeError, TypeError, ValueError) as error:
        raise ResponseError(f"the answer of a sentinel is not understood: {error}") from None
    if not address.host or not 0 < address.port <= PORT_MAX:
        raise ResponseError(f"a sentinel names the address {address}")
    return address


class SentinelService:
    """Directory of the primary of one service. Sentinels are asked at the start, and after the primary failed.

    Args:
        connector: makes nodes.
        sentinels: addresses of sentinels.
        service: name of the primary in their configuration.
        timeout_s: seconds for an answer.
        clock: seconds, for the time between questions.

    Raises:
        redis.exceptions.RedisError, OSError: no sentinel answers.
        MasterDownError: the sentinel does not know the service.
    """

    def __init__(
        self,
        connector: Connector,
        sentinels: Sequence[Address],
        service: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._sentinels = [connector.sentinel(address) for address in sentinels]
        self._service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._refreshing = threading.Lock()  # held by the one thread that asks
        self._is_stale = False
        self._refreshed_s = 0.0
        self._primary = self._find()

    def node_of(self, _name: bytes) -> Node:
        """Return the primary."""
        if self._is_stale:
            self._refresh_if_due()
        return self._primary

    def follow(self, _redirect: AskError) -> Node | None:
        """Return None: the primary is a node of a cluster, and the tier's mode is wrong."""
        return None

    def note_failure(self, _node: Node) -> None:
        """Ask the sentinels before the next call: another server may be the primary."""
        self._is_stale = True

    def others_serve(self, _node: Node, _command: bytes = b"") -> bool:
        """Return False: one server has all chunks."""
        return False

    def nodes(self) -> Sequence[Node]:
        """Return the primary."""
        return [self._primary]

    def close(self) -> None:
        """Close all connections."""
        for node in (self._primary, *self._sentinels):
            node.close()

    def _refresh_if_due(self) -> None:
        if self._clock() < self._refreshed_s + REFRESH_S or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._is_stale = False
            former, self._primary = self._primary, self._find()
            if former is not self._primary:
                former.close()
        except Exception:  # noqa: BLE001  the known primary stays in use; each failure is one of its keys
            self._is_stale = True
        finally:
            self._refreshing.release()

    def _find(self) -> Node:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        try:
            sentinel, reply = first_answer(self._sentinels, self._timeout_s, command)
        finally:
            self._refreshed_s = self._clock()
        if reply is None:
            raise MasterDownError(f"the sentinel {sentinel} knows no service {self._service!r}; correct `service`")
        address = address_in(reply)
        known = getattr(self, "_primary", None)
        return known if known is not None and known.address == address else self._connector.node(address)
