"""Replies of a server, read from the socket of a connection. Values go straight to the caller's buffers.

The client library's parsers return each value as an object of its own: two copies more, and half of the speed of a
plain socket for large frames. They are used for the handshake of a connection alone.
"""

from __future__ import annotations

from typing import Protocol

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from tierkv_valkey.options import PORT_MAX

Reply = object
"""Bytes, a number, None, a list of these, or an exception: an error reply. For a value with a target: its length."""

CHUNK_BYTES = 16 << 10
"""Bytes that are received beyond what is known to come."""
HEAD_BYTES = 64
"""The same where a value with a target comes next: the most that is copied of a large value."""
LINE_BYTES_MAX = 64 << 10
VALUE_BYTES_MAX = 16 << 20
"""Longest value without a target that is taken: no question outside of the data path has such an answer."""
ITEMS_MAX = 1 << 20
"""Most items of a list, and of the lists in it."""
DEPTH_MAX = 8
"""Most lists around an item."""

_ERRORS: dict[str, type[Exception]] = {
    "MOVED": exceptions.MovedError,
    "ASK": exceptions.AskError,
    "TRYAGAIN": exceptions.TryAgainError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
    "MASTERDOWN": exceptions.MasterDownError,
    "OOM": exceptions.OutOfMemoryError,
    "READONLY": exceptions.ReadOnlyError,
    "LOADING": exceptions.BusyLoadingError,
    "BUSY": exceptions.BusyLoadingError,
    "NOPERM": exceptions.NoPermissionError,
    "NOAUTH": exceptions.AuthenticationError,
    "WRONGPASS": exceptions.AuthenticationError,
}
"""Types of error replies by their first word."""


class TooLongError(Exception):
    """A stored value is longer than its target. The rest of the replies is intact."""


class Receive(Protocol):
    """Source of bytes."""

    def __call__(self, buffer: memoryview, /, *, is_known: bool) -> int:
        """Receive some bytes into a buffer and return their number; 0 at the end of the connection.

        is_known: whether enough bytes to fill the buffer will come.
        """


class ReplyReader:
    """Replies of one exchange, in order.

    Args:
        receive: source of their bytes.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._start = self._end = 0
        self._items = 0  # in all lists of the reply so far

    @property
    def is_empty(self) -> bool:
        """Whether every byte that was received has been used."""
        return self._start == self._end

    def read(self, target: memoryview | None = None) -> Reply:
        """Read one reply. A value goes to the start of ``target``, if there is one.

        Raises:
            redis.exceptions.ConnectionError, OSError: the connection ended, or another protocol is spoken.
        """
        self._items = 0
        return self._reply(target, 0)

    def _reply(self, target: memoryview | None, depth: int) -> Reply:
        line = self._line(CHUNK_BYTES if target is None else HEAD_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._value(_number(rest), target)
        if target is not None and kind != b"-":
            raise exceptions.ConnectionError(f"a reply begins with {kind!r}, and a value was asked for")
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return _error(rest.decode(errors="replace"))
        if kind == b"*":
            return self._list(_number(rest), depth)
        raise exceptions.ConnectionError(f"a reply begins with {kind!r}: this is no Valkey or Redis server")

    def _list(self, length: int, depth: int) -> Reply:
        if length < 0:
            return None
        self._items += length
        if self._items > ITEMS_MAX or depth == DEPTH_MAX:
            raise exceptions.ConnectionError(
                f"a list of {length} items within {depth} others is no reply to a question"
            )
        return [self._reply(None, depth + 1) for _ in range(length)]

    def _value(self, length: int, target: memoryview | None) -> Reply:
        if length < 0:
            return None
        if target is None:
            if length > VALUE_BYTES_MAX:
                raise exceptions.ConnectionError(f"a value of {length} bytes is no reply to a question")
            whole = bytearray(length)
            self._fill(memoryview(whole))
            self._end_of_value()
            return bytes(whole)
        if length > len(target):
            left = length
            while left:
                piece = min(left, len(target))
                self._fill(target[:piece])
                left -= piece
            self._end_of_value()
            return TooLongError(f"{length} bytes are stored, and a frame has {len(target)} at most")
        self._fill(target[:length])
        self._end_of_value()
        return length

    def _fill(self, target: memoryview) -> None:
        """Fill a buffer: with what was received already, then from the socket."""
        known = min(len(target), self._end - self._start)
        target[:known] = self._buffer[self._start : self._start + known]
        self._start += known
        while known < len(target):
            known += self._received(target[known:], is_known=True)

    def _end_of_value(self) -> None:
        if self._line(HEAD_BYTES):
            raise exceptions.ConnectionError("a value does not end where its length says")

    def _line(self, chunk_bytes: int) -> bytes:
        line = b""
        while True:
            found = bytes(self._buffer[self._start : self._end])
            head, is_whole, _ = (line[-1:] + found).partition(b"\r\n")
            if is_whole:
                self._start += len(head) + 2 - len(line[-1:])
                return line[:-1] + head
            line += found
            if len(line) > LINE_BYTES_MAX:
                raise exceptions.ConnectionError("a line does not end: this is no Valkey or Redis server")
            self._start, self._end = 0, self._received(self._buffer[:chunk_bytes], is_known=False)

    def _received(self, buffer: memoryview, *, is_known: bool) -> int:
        count = self._receive(buffer, is_known=is_known)
        if not count:
            raise exceptions.ConnectionError("the server closed the connection")
        return count


def _number(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError:
        raise exceptions.ConnectionError(f"{digits[:40]!r} is no number: this is no Valkey or Redis server") from None


def _error(text: str) -> Exception:
    word, _, rest = text.partition(" ")
    kind = _ERRORS.get(word)
    plain: Exception = exceptions.ResponseError(text)
    try:
        error = plain if kind is None else kind(rest)
    except (ValueError, LookupError):  # a redirect that names no node
        return plain
    if isinstance(error, exceptions.AskError):
        names_a_node = 0 <= error.slot_id < REDIS_CLUSTER_HASH_SLOTS and 0 < error.port <= PORT_MAX
        return error if names_a_node else plain
    return error
