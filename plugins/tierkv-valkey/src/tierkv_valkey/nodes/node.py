"""One server: its connections, and its rest after a call without an answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Connection, ConnectionPool, SSLConnection, exceptions

from tierkv_valkey.options import Address, ValkeyOptions

CONNECTIONS_MAX = 64
"""Connections of one node. A call uses one, so the tier's threads bound them long before."""
REST_S, REST_S_MAX = 1.0, 4.0
"""Rest after the first call without an answer, and the longest: it doubles with each further one."""


class RestingError(exceptions.TimeoutError):  # type: ignore[misc]  # untyped here
    """The node gave no answer a moment ago; it was not asked."""


class ClearConnection(Connection):  # type: ignore[misc]  # untyped here
    """The client's connection, whose replies can be read past its parser."""

    def receive(self, buffer: memoryview, timeout_s: float) -> int:
        """Read some bytes; 0 at the end of the connection."""
        return _receive(self._sock, buffer, timeout_s)


class EncryptedConnection(SSLConnection):  # type: ignore[misc]  # as above
    """The client's connection with TLS, likewise."""

    def receive(self, buffer: memoryview, timeout_s: float) -> int:
        """Read some bytes; 0 at the end of the connection."""
        return _receive(self._sock, buffer, timeout_s)


def _receive(connected: socket.socket | None, buffer: memoryview, timeout_s: float) -> int:
    if connected is None:  # closed by another thread
        raise exceptions.ConnectionError("the connection was closed")
    connected.settimeout(timeout_s)
    return connected.recv_into(buffer)


class Node:
    """One server. All methods may be called on any thread.

    Args:
        address: of the server.
        pool: its connections.
        timeout_s: seconds without a byte after which a call fails.
        clock: seconds, for the rest.
    """

    def __init__(
        self, address: Address, pool: ConnectionPool, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._pool = pool
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._late = 0
        self._rests_until_s = 0.0
        self._closed = False

    @property
    def is_resting(self) -> bool:
        """Whether the node gave no answer a moment ago."""
        return self._clock() < self._rests_until_s

    def connection(self) -> Any:  # noqa: ANN401  the client's connection, whose type differs between its versions
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
            if self._late:  # one caller tries, the others fail at once until it knows
                self._rests_until_s = self._clock() + self._rest_s()
        return self._pool.get_connection()

    def release(self, connection: Any) -> None:  # noqa: ANN401  as above
        """Give a connection back."""
        if self._closed:
            connection.disconnect()
        self._pool.release(connection)

    def answered(self) -> None:
        """End the rest: the node has answered."""
        if self._late:
            with self._lock:
                self._late, self._rests_until_s = 0, 0.0

    def was_late(self) -> None:
        """Begin a rest: the node did not answer in time."""
        with self._lock:
            self._rests_until_s = self._clock() + self._rest_s()
            self._late += 1

    def close(self) -> None:
        """Close idle connections. One that a call uses is closed at the end of the call."""
        with self._lock:
            self._closed = True
        self._pool.disconnect(inuse_connections=False)

    def _rest_s(self) -> float:
        return float(min(REST_S_MAX, REST_S * 2 ** min(self._late, 8)))

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
        password = os.environ.get(options.password_env) or None
        return self._node(address, db=options.location.database, username=options.username, password=password)

    def sentinel(self, address: Address) -> Node:
        """A server without data, and with a password of its own."""
        return self._node(address, password=os.environ.get(self.options.sentinel_password_env) or None)

    def _node(self, address: Address, **login: object) -> Node:
        options = self.options
        settings: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "protocol": 2,  # replies without attributes or pushes
            "socket_connect_timeout": options.connect_timeout_s,
            "socket_timeout": options.timeout_s,
            "socket_keepalive": True,
            "retry": None,  # no retry: the framework's has a deadline
            **login,
        }
        kind: type[ClearConnection | EncryptedConnection] = ClearConnection
        if options.location.tls:
            kind = EncryptedConnection
            settings |= {
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": options.check_hostname,
                "ssl_ca_certs": options.ca_file,
                "ssl_certfile": options.cert_file,
                "ssl_keyfile": options.key_file,
            }
        pool = ConnectionPool(connection_class=kind, max_connections=CONNECTIONS_MAX, **settings)
        return Node(address, pool, options.timeout_s)
