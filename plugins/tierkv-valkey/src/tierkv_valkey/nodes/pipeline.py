"""One exchange with one node: commands go out together, and replies come back in their order.

Large values are sent from the caller's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from redis import exceptions

from tierkv_valkey.nodes.node import Node
from tierkv_valkey.nodes.replies import Reply, ReplyReader
from tierkv_valkey.nodes.wire import Wire, Word

Command = Sequence[Word]


class Request(NamedTuple):
    """One command, and the place of its reply."""

    words: Command
    """The command in words."""
    target: memoryview | None = None
    """Buffer for a value; its reply is the length then. None: the value is the reply."""


INLINE_BYTES_MAX = 4096
"""Longest word that is copied beside others, in place of a part of its own."""


def packed(commands: Iterable[Command]) -> list[Word]:
    """Commands in the server's protocol, as parts to send one after the other. Long words are parts, not copies."""
    parts: list[Word] = []
    head = bytearray()
    for words in commands:
        head += b"*%d\r\n" % len(words)
        for word in words:
            head += b"$%d\r\n" % len(word)
            if len(word) <= INLINE_BYTES_MAX:
                head += word
            else:
                parts += (bytes(head), word)
                head.clear()
            head += b"\r\n"
    parts.append(bytes(head))
    return parts


class Pipeline:
    """Commands on their way to a node. Used by one thread.

    A failure of the connection is kept in :attr:`failure`, and is the reply of every command without one.
    :attr:`begun_s` is the time on the node's clock at which it was made.

    Args:
        node: gets the commands.
        requests: in order.
    """

    def __init__(self, node: Node, requests: Sequence[Request]) -> None:
        self.node = node
        self.failure: Exception | None = None
        self._requests = requests
        self._wire: Wire | None = None
        self._is_whole = False
        self.begun_s = node.now_s()

    def send(self) -> None:
        """Send the commands."""
        with _Failing(self):
            self._wire = self.node.take_wire()
            self._wire.send(packed(request.words for request in self._requests), self.node.timeout_s)

    def receive(self, take: Callable[[int, Reply], None], deadline_s: float) -> None:
        """Pass each reply to ``take``, with the number of its command; then give the connection back.

        Args:
            take: must not raise.
            deadline_s: time on the monotonic clock by which the first reply must begin.
        """
        done, wire = 0, self._wire
        if wire is not None and self.failure is None:
            done = self._receive(wire, take, deadline_s)
        self._release()
        for number in range(done, len(self._requests)):
            take(number, self.failure)

    def _receive(self, wire: Wire, take: Callable[[int, Reply], None], deadline_s: float) -> int:
        """Read replies until the last one, or until a failure. Returns their number."""
        done, timeout_s = 0, self.node.timeout_s
        wait_s = [max(0.001, deadline_s - time.monotonic())]  # until the first byte; the node's own timeout after it

        def receive(buffer: memoryview, *, is_known: bool) -> int:
            return wire.receive(buffer, wait_s.pop() if wait_s else timeout_s, is_known=is_known)

        reader = ReplyReader(receive)
        with _Failing(self):
            while done < len(self._requests):
                reply = reader.read(self._requests[done].target)
                if isinstance(reply, exceptions.ConnectionError):  # it loads, runs a script, or wants a password
                    raise reply
                command = bytes(self._requests[done].words[0])
                if isinstance(reply, exceptions.NoPermissionError):
                    self.node.refused(command)
                else:
                    self.node.answered(command)
                take(done, reply)
                done += 1
            self._is_whole = reader.is_empty
        return done

    def _release(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:  # replies of this call must not be read by the next
            self.node.release(wire, is_whole=self._is_whole)


class _Failing:
    """Context that keeps an exception of the connection as the pipeline's failure."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, exceptions.RedisError | OSError):
            return False
        self._pipeline.node.failed()
        if type(error) in (exceptions.TimeoutError, TimeoutError):  # not a RestingError, nor a refusal
            self._pipeline.node.was_late(self._pipeline.begun_s)
        self._pipeline.failure = error.with_traceback(None)
        return True
