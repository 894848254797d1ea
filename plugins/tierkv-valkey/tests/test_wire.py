"""Commands on their way out, replies on their way in, and the connection between."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis import exceptions
from valkey_servers import ValkeyServer
from valkey_support import frames, opened

from tierkv_valkey.nodes.pipeline import INLINE_BYTES_MAX, packed
from tierkv_valkey.nodes.replies import CHUNK_BYTES, HEAD_BYTES, Receive, ReplyReader, TooLongError
from tierkv_valkey.nodes.wire import PARTS_MAX, ClearWire


def test_large_words_are_sent_from_the_callers_memory() -> None:
    """Frames are not copied on their way out, and each is a part of one call of the system."""
    frame = memoryview(bytearray(500_000))
    pieces = packed([(b"SET", b"k", frame), (b"GET", b"k")])
    assert [piece for piece in pieces if isinstance(piece, memoryview)] == [frame]
    assert pieces[1] is frame
    assert b"".join(pieces) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%s\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n" % (
        len(frame),
        frame,
    )
    assert len(packed([(b"EXISTS", b"x" * INLINE_BYTES_MAX)] * 8)) == 1


def pieces_of(data: bytes, rng: random.Random) -> Receive:
    """A socket that gives data in pieces of random lengths, and then ends."""
    left = memoryview(data)

    def receive(buffer: memoryview, *, is_known: bool) -> int:
        nonlocal left
        assert len(left) >= len(buffer) or not is_known or not left, "a call would wait for bytes that never come"
        count = min(len(left), len(buffer), rng.choice((1, 2, 7, 100, 1 << 20)))
        buffer[:count] = left[:count]
        left = left[count:]
        return count

    return receive


@pytest.mark.parametrize(
    "size", [0, 1, 5, HEAD_BYTES - 7, HEAD_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES]
)
def test_replies_are_read_whole_however_they_are_cut(rng: random.Random, size: int) -> None:
    """A network cuts anywhere: within a length, within the end of a line, or in the middle of a frame."""
    value = rng.randbytes(size)
    sent = b":12\r\n+OK\r\n$%d\r\n%s\r\n$-1\r\n$%d\r\n%s\r\n-ERR odd\r\n*2\r\n:1\r\n$1\r\nx\r\n-MOVED 7 a:1\r\n" % (
        *(size, value),
        *(size, value),
    )
    for _ in range(20):
        reader, target = ReplyReader(pieces_of(sent, rng)), memoryview(bytearray(size + 3))
        assert reader.read() == 12
        assert reader.read() == b"OK"
        assert reader.read(target) == size
        assert target[:size] == value
        assert reader.read(target) is None
        assert reader.read() == value
        assert isinstance(reader.read(), exceptions.ResponseError)
        assert reader.read() == [1, b"x"]
        moved = reader.read()
        assert isinstance(moved, exceptions.MovedError)
        assert (moved.slot_id, moved.node_addr) == (7, ("a", 1))
        assert reader.is_empty
        with pytest.raises(exceptions.ConnectionError, match="closed"):
            reader.read()


def test_a_value_that_is_too_long_leaves_the_next_reply_intact(rng: random.Random) -> None:
    """The rest of a value must not be taken for the next reply."""
    reader = ReplyReader(pieces_of(b"$70000\r\n" + b"x" * 70000 + b"\r\n:5\r\n", rng))
    assert isinstance(reader.read(memoryview(bytearray(4096))), TooLongError)
    assert reader.read() == 5


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400 Bad Request\r\n", b"x" * 200_000, b"$3\r\nabcdef\r\n"])
def test_another_protocol_is_refused(rng: random.Random, sent: bytes) -> None:
    """A web server behind the port: an error, and no endless line in memory."""
    reader = ReplyReader(pieces_of(sent, rng))
    with pytest.raises(exceptions.ConnectionError, match=r"no Valkey|does not end"):
        reader.read()


@contextmanager
def wired() -> Iterator[tuple[ClearWire, socket.socket]]:
    """A connection, and the other end of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ClearWire(ours, ours.close), theirs


class Stingy(socket.socket):
    """A socket that takes a little of what it is given, as one with a slow link does."""

    def sendmsg(self, parts: Any, *_: Any) -> int:
        assert len(parts) <= PARTS_MAX
        whole = b"".join(parts)
        return self.send(whole[: max(1, random.Random(len(whole)).randrange(3000))])


def test_many_parts_arrive_whole_however_little_the_kernel_takes(rng: random.Random) -> None:
    """A call of the system takes a part of what it is given: the rest must follow, in order."""
    parts = [rng.randbytes(rng.choice((1, 3, 100, 5000))) for _ in range(PARTS_MAX + 20)]
    ours, theirs = socket.socketpair()
    found = bytearray()

    def read() -> None:
        while data := theirs.recv(1 << 20):
            found.extend(data)

    reader = threading.Thread(target=read)
    with Stingy(fileno=ours.detach()) as stingy, theirs:
        reader.start()
        ClearWire(stingy, stingy.close).send(parts, 5.0)
        stingy.shutdown(socket.SHUT_WR)
        reader.join(30.0)
    assert found == b"".join(parts)


def test_a_silent_server_is_given_up_both_ways() -> None:
    """The kernel keeps the time; its answer must be a timeout of the tier, which makes the node rest."""
    with wired() as (wire, theirs):
        with pytest.raises(TimeoutError):
            wire.receive(memoryview(bytearray(8)), 0.05, is_known=False)
        theirs.sendall(b"abc")
        assert wire.receive(memoryview(bytearray(8)), 0.05, is_known=True) == 3
        with pytest.raises(TimeoutError):
            wire.receive(memoryview(bytearray(5)), 0.05, is_known=True)
        with pytest.raises(TimeoutError):
            wire.send([bytes(64 << 20)], 0.05)


def test_a_slow_server_is_not_given_up_while_bytes_come() -> None:
    """The timeout is one of silence: a link that needs longer for a whole value is served."""
    with wired() as (wire, theirs):
        value = memoryview(bytearray(20))

        def trickle() -> None:
            for _ in range(20):
                time.sleep(0.05)
                theirs.sendall(b"x")

        sender = threading.Thread(target=trickle)
        sender.start()
        done = 0
        while done < len(value):
            done += wire.receive(value[done:], 0.5, is_known=True)
        sender.join()
        assert bytes(value) == b"x" * 20


def test_a_connection_with_something_in_it_is_not_used_again(server: ValkeyServer) -> None:
    """The reply to another call, or the end of a connection: either would be taken for the next reply."""
    with wired() as (wire, theirs):
        assert wire.is_quiet()
        theirs.sendall(b"+OK\r\n")
        assert not wire.is_quiet()
    with wired() as (wire, theirs):
        theirs.close()
        assert not wire.is_quiet()
    with opened(server.url) as tier:
        stored = frames(3)
        tier.put(stored)
        server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert tier.read(list(stored)) == list(stored.values())
