"""One exchange with one node: commands go out together, and replies come back in their order.

Large values are sent from the caller's memory, in pieces, so that the timeout is one of silence and not of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from redis import exceptions

from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.replies import Reply, ReplyReader

Word = bytes | memoryview
Command = Sequence[Word]


class Request(NamedTuple):
    """One command, and the place of its reply."""

    words: Command
    """The command in words."""
    target: memoryview | None = None
    """Buffer for a value; its reply is the length then. None: the value is the reply."""


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

    Args:
        node: gets the commands.
        requests: in order.
    """

    def __init__(self, node: Node, requests: Sequence[Request]) -> None:
        self.node = node
        self.failure: Exception | None = None
        self._requests = requests
        self._connection: Any = None
        self._is_whole = False

    def send(self) -> None:
        """Send the commands."""
        with _Failing(self):
            self._connection = self.node.connection()
            self._connection.send_packed_command(
                packed(request.words for request in self._requests), check_health=False
            )

    def receive(self, take: Callable[[int, Reply], None], deadline_s: float) -> None:
        """Pass each reply to ``take``, with the number of its command; then give the connection back.

        Args:
            take: must not raise.
            deadline_s: time on the monotonic clock by which the first reply must begin.
        """
        done = 0
        wait_s = [max(0.001, deadline_s - time.monotonic())]  # until the first byte; the node's own timeout after it
        reader = ReplyReader(lambda buffer: self._connection.receive(buffer, wait_s.pop() if wait_s else timeout_s))
        timeout_s = self.node.timeout_s
        with _Failing(self):
            while self.failure is None and done < len(self._requests):
                reply = reader.read(self._requests[done].target)
                if isinstance(reply, exceptions.ConnectionError):  # it loads its data, or wants a password
                    raise reply
                self.node.answered()
                take(done, reply)
                done += 1
        self._is_whole = self.failure is None and reader.is_empty
        self._release()
        for number in range(done, len(self._requests)):
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
        if type(error) in (exceptions.TimeoutError, TimeoutError):  # not a RestingError, nor a refusal
            self._pipeline.node.was_late()
        self._pipeline.failure = error.with_traceback(None)
        return True
