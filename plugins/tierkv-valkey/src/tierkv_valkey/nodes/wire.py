"""Connections whose bytes go straight between the server and the caller's memory.

The client library connects, authenticates and encrypts. From then on this module uses the socket: the library copies
each value several times, and sets a timeout around each piece. On a socket without encryption the kernel keeps the
time, so a call of the system moves a whole batch, or a whole value, and no other thread has to wait for it.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import redis
from redis import exceptions

Word = bytes | memoryview
PARTS_MAX = 512
"""Parts of one call of the system; Linux takes 1,024."""
PIECE_BYTES = 256 << 10
"""Bytes that are encrypted at once, so that the timeout is one of silence and not of the whole."""


class Wire(Protocol):
    """One connection that is ready. Used by one thread at a time."""

    def send(self, parts: Sequence[Word], timeout_s: float, /) -> None:
        """Send all parts, one after the other.

        Raises:
            TimeoutError: the server took no byte for ``timeout_s``.
            OSError: the connection ended.
        """

    def receive(self, buffer: memoryview, timeout_s: float, /, *, is_known: bool) -> int:
        """Receive some bytes into the start of a buffer; 0 at the end of the connection.

        Args:
            buffer: at least one byte long.
            timeout_s: seconds without a byte.
            is_known: whether the server will send enough bytes to fill the buffer.

        Raises:
            TimeoutError: no byte came.
            OSError: the connection ended.
        """

    def is_quiet(self) -> bool:
        """Whether the connection is open and no byte of an earlier call is left in it."""

    def close(self) -> None:
        """Close the connection."""


def open_wire(kind: type[redis.Connection], settings: dict[str, object]) -> Wire:
    """Connect as the client does.

    Raises:
        redis.exceptions.RedisError, OSError: the server does not answer, or refuses.
    """
    connection = kind(**settings)
    try:
        connection.connect()
    except ValueError as error:  # another node named a host that cannot be one
        raise exceptions.ConnectionError(f"no connection to {settings['host']!r}: {error}") from None
    found = getattr(connection, "_sock", None)  # it has no public name; versions 6 to 8 have this one
    if isinstance(found, ssl.SSLSocket):
        return EncryptedWire(found, connection.disconnect)
    if isinstance(found, socket.socket):
        return ClearWire(found, connection.disconnect)
    connection.disconnect()
    raise exceptions.ConnectionError(f"redis {redis.__version__} keeps its socket elsewhere; install redis>=6,<9")


class ClearWire:
    """Connection without encryption.

    Args:
        connected: its socket.
        disconnect: closes it.
    """

    def __init__(self, connected: socket.socket, disconnect: Callable[[], object]) -> None:
        self._socket = connected
        self._disconnect = disconnect
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._limits_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        connected.settimeout(None)

    def send(self, parts: Sequence[Word], timeout_s: float) -> None:
        """Send the parts by as few calls of the system as the kernel allows."""
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        for start in range(0, len(parts), PARTS_MAX):
            left = list(parts[start : start + PARTS_MAX])
            while left:
                try:
                    count = self._socket.sendmsg(left)
                except BlockingIOError:
                    raise TimeoutError("timed out") from None
                left = _behind(left, count)

    def receive(self, buffer: memoryview, timeout_s: float, *, is_known: bool) -> int:
        """Receive; bytes that are known to come by one call of the system."""
        self._limit(socket.SO_RCVTIMEO, timeout_s)
        try:
            return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL if is_known else 0)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def is_quiet(self) -> bool:
        """Ask the kernel whether there is anything to receive."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()

    def _limit(self, option: int, timeout_s: float) -> None:
        if self._limits_s[option] != timeout_s:
            self._limits_s[option] = timeout_s
            microseconds = max(1, round(timeout_s * 1e6))  # 0 would mean for ever
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))


class EncryptedWire:
    """Connection with TLS, whose library keeps no time by itself and takes one part at a time.

    Args:
        connected: its socket.
        disconnect: closes it.
    """

    def __init__(self, connected: ssl.SSLSocket, disconnect: Callable[[], object]) -> None:
        self._socket = connected
        self._disconnect = disconnect

    def send(self, parts: Sequence[Word], timeout_s: float) -> None:
        """Send the parts in pieces."""
        self._limit(timeout_s)
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                self._socket.sendall(part[start : start + PIECE_BYTES])

    def receive(self, buffer: memoryview, timeout_s: float, *, is_known: bool) -> int:  # noqa: ARG002  no use for it
        """Receive and decrypt."""
        self._limit(timeout_s)
        return self._socket.recv_into(buffer)

    def is_quiet(self) -> bool:
        """Receive what is there: a server may send messages of TLS itself at any time."""
        self._limit(0.0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()

    def _limit(self, timeout_s: float) -> None:
        if self._socket.gettimeout() != timeout_s:
            self._socket.settimeout(timeout_s)


def _behind(parts: Sequence[Word], count: int) -> list[Word]:
    """Return the rest of the parts behind their first ``count`` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[number + 1 :]]
        count -= len(part)
    return []
