"""One exchange with one node: commands go out together, and replies come back in their order.

Large values are sent from the caller's memory, in pieces, so that the timeout is one of silence and not of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from redis import exceptions

from tierkv_valkey.nodes.node import Node

Word = bytes | memoryview
Command = Sequence[Word]
Reply = object
"""Bytes, a number, None, a list of these, or an exception: an error reply."""

PIECE_BYTES = 256 << 10
INLINE_BYTES_MAX = 4096
"""Longest word that is copied beside others, in place of a system call of its own."""


def packed(commands: Iterable[Command]) -> Iterator[Word]:
    """Commands in the server's protocol, as pieces to send one after the other."""
    head = bytearray()
    for words in commands:
        head += b"*%d\r\n" % len(words)
        for word in words:
            head += b"$%d\r\n" % len(word)
            if len(word) <= INLINE_BYTES_MAX:
                head += word
            else:
                yield bytes(head)
                head.clear()
                yield from (word[start : start + PIECE_BYTES] for start in range(0, len(word), PIECE_BYTES))
            head += b"\r\n"
    if head:
        yield bytes(head)


class Pipeline:
    """Commands on their way to a node. Used by one thread.

    A failure of the connection is kept in :attr:`failure`, and is the reply of every command without one.
    """

    def __init__(self, node: Node, commands: Sequence[Command]) -> None:
        self.node = node
        self.failure: Exception | None = None
        self._commands = commands
        self._connection: Any = None
        self._is_whole = False

    def send(self) -> None:
        """Send the commands."""
        with _Failing(self):
            self._connection = self.node.connection()
            self._connection.send_packed_command(packed(self._commands), check_health=False)

    def receive(self, take: Callable[[int, Reply], None], deadline_s: float) -> None:
        """Pass each reply to ``take``, with the number of its command; then give the connection back.

        Args:
            take: must not raise.
            deadline_s: time on the monotonic clock by which the first reply must begin.
        """
        done = 0
        with _Failing(self):
            if self.failure is None and not self._connection.can_read(max(0.0, deadline_s - time.monotonic())):
                raise exceptions.TimeoutError("no reply")
            while self.failure is None and done < len(self._commands):
                try:
                    reply = self._connection.read_response(disable_decoding=True)
                except exceptions.ResponseError as error:
                    reply = error.with_traceback(None)
                self.node.answered()
                take(done, reply)
                done += 1
        self._is_whole = self.failure is None
        self._release()
        for number in range(done, len(self._commands)):
            take(number, self.failure)

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if not self._is_whole:  # replies of this call must not be read by the next
                connection.disconnect()
            self.node.release(connection)


class _Failing:
    """Context that keeps an exception of the connection as the pipeline's failure."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, exceptions.RedisError | OSError):
            return False
        if isinstance(error, exceptions.TimeoutError) and type(error) is exceptions.TimeoutError:
            self._pipeline.node.was_late()
        self._pipeline.failure = error.with_traceback(None)
        return True
