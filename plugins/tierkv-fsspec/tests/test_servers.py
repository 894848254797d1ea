"""Guarantees on every object server, through both implementations.

By default the server is moto. ``TIERKV_TEST_OBJECT_URL`` names a bucket or container of another server, such as
``s3://bucket`` or ``az://container``, and ``TIERKV_TEST_OBJECT_ENDPOINT`` its address; credentials for it come from the
environment. The nox sessions object-radosgw and object-azurite do so.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from fsspec_engine import PROMPT_TOKENS
from fsspec_raw import ServerObjects
from fsspec_support import (
    CHILD_TIMEOUT_S,
    ObjectServer,
    check,
    get,
    key,
    namespace,
    object_name,
    open_at,
    put,
    run_child,
)

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.errors import NamespaceMismatchError
from tierkv.testing import BackendConformance
from tierkv_fsspec import FsspecOptions

FRAME = bytes(range(256)) * 200
MANIFEST = f"{namespace().fingerprint().hex()}/namespace.json"


@pytest.fixture(params=["obstore", "fsspec"])
def options(request: pytest.FixtureRequest, server: ObjectServer) -> dict[str, Any]:
    """Options of a tier on the server, once for each implementation."""
    return server.options(request.param)


@pytest.fixture
def url(server: ObjectServer) -> str:
    """URL of a new prefix."""
    return server.new_place()


@pytest.fixture(scope="class")
def server_of_class(request: pytest.FixtureRequest, server: ObjectServer) -> None:
    """Server for the kit, which makes options without fixtures."""
    request.cls.server = server


@pytest.mark.usefixtures("server_of_class")
class ServerConformance(BackendConformance):
    """Conformance. Every place is a prefix."""

    plugin = tierkv_fsspec.PLUGIN
    local_place = False
    raw_live = True
    many_frames = 100
    model_examples = 6
    model_steps = 15
    crash_rounds = 2
    implementation: ClassVar[Literal["obstore", "fsspec"]]
    server: ClassVar[ObjectServer]

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=self.url(place), **self.server.options(self.implementation))

    def raw(self, place: Path, context: BackendContext) -> ServerObjects:
        return ServerObjects(self.server, self.url(place), context.namespace.fingerprint().hex())

    def url(self, place: Path) -> str:
        """The place, as a prefix."""
        return f"{self.server.url}/{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"


class TestThroughObstore(ServerConformance):
    implementation = "obstore"


class TestThroughFsspec(ServerConformance):
    """Fewer rounds, because these requests are slow."""

    implementation = "fsspec"
    many_frames = 30
    crash_rounds = 1
    model_examples = 1
    model_steps = 10


OTHER_PROCESS = """
import sys, json, fsspec_support as s
backend = s.open_at(sys.argv[1], **json.loads(sys.argv[2]))
assert s.get(backend, s.key(1)) == [b"from the first"]
assert s.put(backend, {s.key(2): b"from the second"}) == [None]
backend.delete([s.key(3)])
"""


def test_two_processes_share_a_bucket(url: str, options: dict[str, Any]) -> None:
    """A chunk stored by one process is a hit in the other, and a deleted one a miss, without a reopen."""
    backend = open_at(url, **options)
    put(backend, {key(1): b"from the first", key(3): b"to be deleted"})
    assert backend.contains([key(1), key(2), key(3)]) == [True, False, True]
    run_child(OTHER_PROCESS, url, json.dumps(options))
    assert backend.contains([key(1), key(2), key(3)]) == [True, True, False]
    assert get(backend, key(1), key(2), key(3)) == [b"from the first", b"from the second", None]
    backend.close()


@contextmanager
def engine(url: str, options: dict[str, Any]) -> Iterator[Any]:
    """An engine with its own stack, in a separate process; called with a prompt, it returns the loaded tokens."""
    tier = {"name": "remote", "backend": "fsspec", "url": url, **{k: v for k, v in options.items() if v is not None}}
    config = {"host": {"capacity": "1MiB"}, "chunk": {"blocks": 2}, "tiers": [tier]}
    command = [sys.executable, "fsspec_engine.py", json.dumps(config)]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(CHILD_TIMEOUT_S, process.kill)
    watchdog.start()
    assert process.stdin is not None
    assert process.stdout is not None

    def serve(prompt: str) -> int:
        process.stdin.write(f"{prompt}\n")
        process.stdin.flush()
        loaded: int = json.loads(process.stdout.readline())["loaded"]
        return loaded

    try:
        yield serve
        process.stdin.close()
        assert process.wait(CHILD_TIMEOUT_S) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_stacks_in_two_processes_share_a_bucket(url: str, options: dict[str, Any]) -> None:
    """The purpose of the tier: chunks computed by one engine are loaded by another one, while both run."""
    with engine(url, options) as first, engine(url, options) as second:
        assert first("system prompt") == 0
        assert second("system prompt") == PROMPT_TOKENS
        assert second("another") == 0
        assert first("another") == PROMPT_TOKENS
    with engine(url, options) as third:
        assert third("system prompt") == PROMPT_TOKENS


def test_names_are_as_documented(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """Other tools clean up and count by prefix: names are part of the format."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME})
    backend.close()
    assert server.names(url) == sorted([MANIFEST, object_name(key(1))])


def test_deleted_out_of_band(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """A lifecycle rule or a user removes objects: misses, at once, and they can be stored again."""
    backend = open_at(url, **options)
    put(backend, {key(1): FRAME, key(2): FRAME})
    assert backend.contains([key(1), key(2)]) == [True, True]
    server.remove(url, object_name(key(1)))
    assert backend.contains([key(1), key(2)]) == [False, True]
    assert get(backend, key(1), key(2)) == [None, FRAME]
    assert put(backend, {key(1): FRAME}) == [None]
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_first_of_two_writers_wins_a_name(url: str, options: dict[str, Any]) -> None:
    """Two processes that look at once both find no object; the server lets one of them create it."""
    backend = open_at(url, **options)
    store = backend._store
    assert store.create("once", b"first")
    store.exists = lambda _name: False  # it looked before the other one wrote
    assert not store.create("once", b"second")
    assert store.read("once") == b"first"
    backend.close()


def test_lost_race_counts_as_stored(url: str, options: dict[str, Any]) -> None:
    """Two engines miss the same chunk, compute and store it: the server refuses the second, which counts as stored."""
    one, two = open_at(url, **options), open_at(url, **options)
    assert one.contains([key(1)]) == two.contains([key(1)]) == [False]
    assert put(one, {key(1): FRAME}) == [None]
    assert put(two, {key(1): FRAME}) == [None]
    assert two.contains([key(1)]) == [True]
    assert get(one, key(1)) == [FRAME]
    one.close()
    two.close()


def test_lost_race_against_another_frame_replaces_it(url: str, options: dict[str, Any]) -> None:
    """A refused conditional put means that an object exists, not that it is equal: a damaged one must be replaced."""
    one, two = open_at(url, **options), open_at(url, **options)
    assert two.contains([key(1)]) == [False]
    put(one, {key(1): b"x" + FRAME[1:]})
    assert put(two, {key(1): FRAME}) == [None]
    assert get(one, key(1)) == [FRAME]
    one.close()
    two.close()


def test_writers_and_deleters_of_one_key_at_once(url: str, options: dict[str, Any]) -> None:
    """Many engines share a bucket: for any concurrent calls on one key, each call ends and each read is whole."""
    backends = [open_at(url, **options) for _ in range(3)]
    frames = [bytes([number]) * 30_000 for number in range(3)]
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(6):
            wrong.extend(result for result in put(backends[number], {key(1): frames[number]}) if result is not None)
            (seen,) = get(backends[number], key(1))
            if seen is not None and seen not in frames:
                wrong.append(seen)
            if turn % 3 == number:
                wrong.extend(result for result in backends[number].delete([key(1)]) if result is not None)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    put(backends[0], {key(1): FRAME})
    assert get(backends[2], key(1)) == [FRAME]
    for backend in backends:
        backend.close()


def test_manifest_describes_the_namespace_for_users(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """A user who finds a bucket full of digests must be able to see their model and age."""
    open_at(url, **options).close()
    first = server.get(url, MANIFEST)
    manifest = json.loads(first)
    assert list(manifest) == ["format", "version", "created", "fingerprint", "namespace"]
    assert manifest["created"].startswith("20")
    assert manifest["namespace"]["model"] == "tests"
    assert manifest["namespace"]["dtype"] == "bfloat16"
    assert manifest["namespace"]["groups"] == [[16, [4096], "full_attention", None]]
    open_at(url, **options).close()
    assert server.get(url, MANIFEST) == first, "the second writer keeps it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "not a manifest of tierkv"),
        (b'{"format": "tierkv-fsspec", "version": 2}', "version is 2, and this program reads 1"),
    ],
)
def test_foreign_manifest_is_refused_and_unchanged(
    server: ObjectServer, url: str, options: dict[str, Any], content: bytes, message: str
) -> None:
    """Data of another program, or of a later version, must not be written."""
    server.put(url, MANIFEST, content)
    with pytest.raises(NamespaceMismatchError, match=message) as failure:
        open_at(url, **options)
    assert "Give another url" in str(failure.value)
    assert server.get(url, MANIFEST) == content


@pytest.mark.parametrize("content", [b"\xff not json", b""])
def test_a_damaged_manifest_is_written_anew(
    server: ObjectServer, url: str, options: dict[str, Any], content: bytes
) -> None:
    """It stands below this namespace's fingerprint, so it can be nothing else."""
    server.put(url, MANIFEST, content)
    open_at(url, **options).close()
    assert json.loads(server.get(url, MANIFEST))["format"] == "tierkv-fsspec"


def test_mismatching_manifest_names_what_differs(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """A manifest copied from elsewhere: the message names the fields that differ, and how."""
    open_at(url, **options).close()
    manifest = json.loads(server.get(url, MANIFEST))
    manifest["namespace"]["dtype"] = "float16"
    server.put(url, MANIFEST, json.dumps(manifest).encode())
    with pytest.raises(NamespaceMismatchError, match="dtype is 'float16' there and 'bfloat16' here"):
        open_at(url, **options)


def test_many_open_at_once(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """All ranks of a server start together: one writes the manifest, and all of them open."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(6)

    def start() -> None:
        barrier.wait()
        try:
            open_at(url, **options).close()
        except BaseException as error:  # noqa: BLE001  the thread's failure is judged below
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert server.names(url) == [MANIFEST]


def test_listing_answers_the_first_question(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """After a restart a long prefix is known without a request per chunk; a deleted chunk is then a plain miss."""
    keys = [key(number) for number in range(20)]
    backend = open_at(url, **options)
    put(backend, dict.fromkeys(keys, b"frame"))
    backend.close()
    backend = open_at(url, **options)
    backend._warming.join(CHILD_TIMEOUT_S)
    server.remove(url, object_name(keys[7]))
    asked: list[str] = []
    exists = backend._store.exists

    def noting(name: str) -> bool:
        asked.append(name)
        found: bool = exists(name)
        return found

    backend._store.exists = noting
    assert backend.contains([*keys, key(99)]) == [True] * 20 + [False]
    assert len(asked) == 1, "only unlisted names are requested"
    assert get(backend, keys[7], keys[8]) == [None, b"frame"]
    assert backend.contains(keys) == [number != 7 for number in range(20)], "the second lookup is sent to the server"
    backend.close()


def test_check_of_a_good_path(server: ObjectServer, url: str, options: dict[str, Any]) -> None:
    """All results are good, name the implementation, and no object remains."""
    found = check(url, **options)
    assert all(check_result.ok for check_result in found.values()), found
    assert ("obstore" in found["package"].detail) == (options["implementation"] == "obstore")
    assert found["write"].detail == "a short object was stored and removed"
    assert server.names(url) == []
