"""Any bytes from a server: replies, or an error of the client that the tier turns into one of ours."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from hypothesis import strategies as st
from parser_inputs import any_bytes, any_json, parser_test
from redis import exceptions

from tierkv.errors import BackendError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_valkey.backend import _key_of
from tierkv_valkey.descriptions import Description, parse_description
from tierkv_valkey.failures import Failure
from tierkv_valkey.nodes.cluster import slot_ranges
from tierkv_valkey.nodes.pipeline import packed
from tierkv_valkey.nodes.replies import Receive, ReplyReader, TooLongError
from tierkv_valkey.nodes.scanning import page_in
from tierkv_valkey.nodes.sentinel import address_in
from tierkv_valkey.options import Location

HERE = Path(__file__).parent
NAMESPACE = Namespace("m", "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)
DESCRIBED = Description.of("tierkv", NAMESPACE)
REPLIES = [
    b":12\r\n+OK\r\n$3\r\nabc\r\n$-1\r\n-ERR odd\r\n*2\r\n:1\r\n$1\r\nx\r\n",
    b"-MOVED 7 a:1\r\n-ASK 16383 b:65535\r\n-LOADING it does\r\n*-1\r\n*0\r\n",
    b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n",
    b"*2\r\n$2\r\n17\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    b"*2\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n",
    b"$40\r\n" + b"x" * 40 + b"\r\n",
]
SIZES = (b"*1\r\n" * 20, b"*99999999\r\n", b"$9999999999\r\n", b"$" + b"9" * 5000 + b"\r\n", b"*+3\r\n", b":1_0\r\n")


def received(data: bytes, piece: int) -> Receive:
    """A connection that gives data in pieces and then ends."""
    left = memoryview(data)

    def receive(buffer: memoryview, *, is_known: bool) -> int:
        nonlocal left
        count = min(len(left), len(buffer), piece)
        buffer[:count] = left[:count]
        left = left[count:]
        return count

    return receive


def streams() -> st.SearchStrategy[bytes]:
    """Draw replies of a server with changes, and with lengths that no reply has."""
    inputs = any_bytes([*REPLIES, b"".join(REPLIES)])
    return inputs | st.tuples(inputs, st.sampled_from(SIZES), inputs).map(b"".join)


@parser_test(HERE / "corpus" / "replies", streams())
def test_any_bytes_are_replies_or_an_error_of_the_client(data: bytes) -> None:
    """A proxy, a web server, a server of another version: the call fails, the node may be asked again, none dies."""
    found = []
    for piece in (1 << 20, 7):
        reader, replies = ReplyReader(received(data, piece)), list[object]()
        with contextlib.suppress(exceptions.RedisError):
            while True:
                replies.append(reader.read())
        found.append([str(reply) for reply in replies])
        for reply in replies:
            _look_at(reply)
    assert found[0] == found[1]
    reader, target = ReplyReader(received(data, 5)), memoryview(bytearray(16))
    with contextlib.suppress(exceptions.RedisError):
        while True:
            reply = reader.read(target)
            assert reply is None or isinstance(reply, TooLongError | exceptions.RedisError | int)
            assert not isinstance(reply, int) or 0 <= reply <= len(target)


def _look_at(reply: object) -> None:
    """Take a reply for each answer that a topology is made of, and an error for one of ours."""
    if isinstance(reply, Exception):
        assert isinstance(Failure.of(reply).to_error("cannot read", tier="v"), TierKVError)
        return
    with contextlib.suppress(exceptions.ResponseError):
        assert all(0 <= first <= last < 16384 and 0 < port < 65536 for first, last, _, port in slot_ranges(reply))
    with contextlib.suppress(exceptions.ResponseError):
        cursor, names = page_in(reply)
        assert cursor.isdigit()
        assert all(isinstance(name, bytes) for name in names)
    with contextlib.suppress(exceptions.ResponseError):
        assert 0 < address_in(reply).port < 65536


@parser_test(HERE / "corpus" / "words", any_bytes([b"GET", b"k" * 5000, b"$1\r\n"], 40))
def test_any_words_are_read_as_they_were_packed(data: bytes) -> None:
    """A command is a list of values, as replies are: names and frames may hold any bytes."""
    sent = b"".join(map(bytes, packed([(b"SET", data, memoryview(data))])))
    assert ReplyReader(received(sent, 11)).read() == [b"SET", data, data]


@parser_test(HERE / "corpus" / "descriptions", any_json([json.loads(DESCRIBED.content)]))
def test_any_description_is_the_namespace_or_damaged(data: bytes) -> None:
    """Other users of the server may overwrite it: tools name the damage, and never take it for another model's."""
    fingerprint = NAMESPACE.fingerprint().hex().encode()
    with contextlib.suppress(BackendError):
        assert parse_description(DESCRIBED.name, fingerprint, data) == NAMESPACE


@parser_test(HERE / "corpus" / "names", any_bytes([b"00ff" * 8, b"AB", b"a b"], 40))
def test_any_name_is_that_of_one_key(data: bytes) -> None:
    """Two names of one key would make a chunk listed twice and never found under one of them."""
    key = _key_of(data)
    assert key is None or key.hex().encode() == data


URLS = [b"valkey://10.0.0.7:6379/3", b"rediss://a.example,b.example:7000", b"valkey://[::1]:1"]


@parser_test(HERE / "corpus" / "urls", any_bytes(URLS, 40))
def test_any_url_is_a_location_or_refused(data: bytes) -> None:
    """A URL is typed by hand, sometimes with a password, which no message may repeat."""
    with contextlib.suppress(ValueError):
        assert Location.parse(data.decode(errors="replace")).addresses
