"""One server: its connections, and its rest after a call without an answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Connection, SSLConnection, exceptions
from redis.connection import _RESP2Parser

from tierkv.abc.logs import plugin_logger
from tierkv_valkey.nodes.wire import Wire, open_wire
from tierkv_valkey.options import Address, ValkeyOptions

REST_S, REST_S_MAX = 1.0, 4.0
"""Rest after the second call in a row without an answer, and the longest: it doubles with each further one.

After the first there is none. A server that a slow command blocks answers the next try, or the one after it."""


AWAY_S = 1.0
"""Seconds of failed calls after which a node is logged as away. A lost connection, or a restart, is none."""
AWAY_LINES_S = 60.0
"""Shortest time between two such lines about one node."""

_log = plugin_logger(__name__)


class RestingError(exceptions.TimeoutError):  # type: ignore[misc]  # untyped here
    """The node gave no answer a moment ago; it was not asked."""


class Node:
    """One server. All methods may be called on any thread.

    A call uses one connection, so the tier's threads bound their number.

    Args:
        address: of the server.
        connect: makes a connection that is ready.
        timeout_s: seconds without a byte after which a call fails.
        clock: seconds, for the rest.
    """

    def __init__(
        self,
        address: Address,
        connect: Callable[[], Wire],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._idle: list[Wire] = []
        self._late = 0
        self._late_s = -math.inf
        self._rests_until_s = 0.0
        self._closed = False
        self.answered_s = -math.inf
        """Time of the latest reply."""
        self.failing_since_s: float | None = None
        """Time of the first failed call since the latest reply; None: the latest call was answered."""
        self._refused_since_s: dict[bytes, float] = {}  # by command
        self._is_away = False
        self._away_s = -math.inf

    @property
    def is_resting(self) -> bool:
        """Whether the node gave no answer a moment ago."""
        return self._clock() < self._rests_until_s

    def take_wire(self) -> Wire:
        """Take a connection that is ready; give it back with :meth:`release`.

        Raises:
            RestingError: the node rests.
            redis.exceptions.RedisError, OSError: there is no connection.
        """
        with self._lock:
            if self._closed:
                raise exceptions.ConnectionError("the tier is closed")
            if self.is_resting:
                raise RestingError("no answer a moment ago; the node is left alone for a while")
            if self._late > 1:  # one caller tries, the others fail at once until it knows
                self._rests_until_s = self._clock() + self._rest_s()
        while (wire := self._take_idle()) is not None:
            if wire.is_quiet():
                return wire
            wire.close()  # the server closed it while it was idle
        return self._connect()

    def release(self, wire: Wire, *, is_whole: bool) -> None:
        """Give a connection back. is_whole: whether every byte of its replies was read, so that it can serve again."""
        with self._lock:
            if is_whole and not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def does_not_serve_since(self, command: bytes) -> float | None:
        """Time since which the node answers nothing, or refuses this command whatever its key; None: it serves it."""
        return self._refused_since_s.get(command) if self.failing_since_s is None else self.failing_since_s

    def answered(self, command: bytes) -> None:
        """End the rest: the node has answered this command."""
        self._refused_since_s.pop(command, None)
        now_s, since_s = self._clock(), self.failing_since_s
        self.answered_s, self.failing_since_s = now_s, None
        if self._is_away and since_s is not None:
            self._is_away = False
            _log.warning("node %s serves again, after %.3g s", self, now_s - since_s)
        if self._late:
            with self._lock:
                self._late, self._rests_until_s = 0, 0.0

    def failed(self) -> None:
        """Note that a call was not answered."""
        if self.failing_since_s is None:
            self.failing_since_s = self._clock()

    def refused(self, command: bytes) -> None:
        """Note that the node refuses this command, whatever its key: the user lacks the right. It may serve others."""
        self._refused_since_s.setdefault(command, self._clock())

    def note_away(self) -> None:
        """Log that the node is away, while others serve: once, and not again within :data:`AWAY_LINES_S`."""
        with self._lock:
            now_s, since_s = self._clock(), self.failing_since_s
            is_short = since_s is None or now_s < since_s + AWAY_S
            if self._is_away or is_short or now_s < self._away_s + AWAY_LINES_S:
                return
            self._is_away, self._away_s = True, now_s
        _log.warning("node %s does not serve; its chunks are misses, and other nodes serve", self)

    def was_late(self, begun_s: float) -> None:
        """The node did not answer in time a call that began at ``begun_s``: begin a rest, unless it is the first.

        Calls that waited side by side count once.
        """
        with self._lock:
            if begun_s < self._late_s:
                return
            self._late += 1
            self._late_s = self._clock()
            if self._late > 1:
                self._rests_until_s = self._late_s + self._rest_s()

    def now_s(self) -> float:
        """Time on the node's clock."""
        return self._clock()

    def close(self) -> None:
        """Close idle connections. One that a call uses is closed at the end of the call."""
        with self._lock:
            self._closed = True
        while (wire := self._take_idle()) is not None:
            wire.close()

    def _take_idle(self) -> Wire | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _rest_s(self) -> float:
        return float(min(REST_S_MAX, REST_S * 2 ** min(self._late - 2, 8)))

    def __str__(self) -> str:
        """Text for messages."""
        return str(self.address)


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes nodes with the options of a tier."""

    options: ValkeyOptions

    def node(self, address: Address) -> Node:
        """A server with the data."""
        options = self.options
        return self._node(address, options.password, db=options.location.database, username=options.username)

    def sentinel(self, address: Address) -> Node:
        """A server without data, and with a password of its own."""
        return self._node(address, self.options.sentinel_password)

    def _node(self, address: Address, password: Callable[[], str | None], **login: object) -> Node:
        """A server. password: asked for each connection, since it may be replaced meanwhile."""
        options = self.options
        settings: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "protocol": 2,  # replies without attributes or pushes
            "socket_connect_timeout": options.connect_timeout_s,
            "socket_timeout": options.timeout_s,
            "socket_keepalive": True,
            "retry": None,  # no retry: the framework's has a deadline
            # Not hiredis: it makes a list as long as a reply says, for seconds in which no other thread runs.
            "parser_class": _RESP2Parser,
            **login,
        }
        kind = Connection
        if options.location.tls:
            kind = SSLConnection
            settings |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": options.check_hostname,
                "ssl_ca_certs": options.ca_file,
                "ssl_certfile": options.cert_file,
                "ssl_keyfile": options.key_file,
            }
        return Node(address, lambda: open_wire(kind, {**settings, "password": password()}), options.timeout_s)
