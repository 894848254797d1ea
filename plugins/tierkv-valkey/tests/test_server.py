"""One server: outages, eviction, a full server, expiry, and engines that share."""

from __future__ import annotations

import inspect
import operator
import random
import threading
import time
from pathlib import Path

import pytest
import redis.connection
from redis.connection import AbstractConnection
from valkey_servers import CACHE, ValkeyServer, until
from valkey_support import CHUNK_NAMES, context, frames, heals, only_misses, opened, traffic

import tierkv_valkey
from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError, TierKVError
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv_valkey import ValkeyOptions
from tierkv_valkey.nodes.node import REST_S

KIB, MIB = 1 << 10, 1 << 20


def small_stack(server: ValkeyServer, place: Path, **options: object) -> SmallStack:
    """A small stack over a tier on the server."""
    return SmallStack(
        tierkv_valkey.PLUGIN,
        lambda place: ValkeyOptions(url=server.url, timeout_s=0.5),
        place,
        capacity_bytes=None,
        **options,  # type: ignore[arg-type]
    )


def serves_again(stack: SmallStack, prompt: Prompt) -> bool:
    """Whether a prompt is stored and found once the stack's own pauses are over."""
    stack.settle()
    stack.until_usable()
    stack.pass_time(60.0)
    stack.forget_host()
    stack.store_all(prompt)
    return stack.load_cold(prompt) == 4


def test_a_server_that_evicts_under_load_gives_misses_only(tmp_path: Path, rng: random.Random) -> None:
    """The server forgets whatever it likes while engines read and write: a miss, never an error or other bytes."""
    with ValkeyServer(tmp_path / "server", "--maxmemory", "24mb") as server, opened(server.url) as tier:
        stored = frames(800, 64 * KIB)
        keys = list(stored)
        hits = misses = 0

        def work() -> None:
            nonlocal hits, misses
            chosen = rng.sample(keys, 16)
            assert tier.write({key: stored[key] for key in chosen}) == [None] * 16
            found = tier.read(rng.sample(keys, 16) if rng.random() < 0.5 else chosen)
            assert not [item for item in found if isinstance(item, TierKVError)]
            hits += sum(item is not None for item in found)
            misses += sum(item is None for item in found)
            for item in found:
                assert item is None or item in values

        values = set(stored.values())
        with traffic(work):
            until(lambda: hits > 200 and misses > 200, "hits and misses")


def test_a_server_that_is_full_and_evicts_nothing_says_so(tmp_path: Path) -> None:
    """With noeviction a store fails as "full", reads go on, and check names the setting."""
    with ValkeyServer(tmp_path / "server", "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        options = ValkeyOptions(url=server.url)
        assert tierkv_valkey.PLUGIN.check is not None
        (memory,) = (line for line in tierkv_valkey.PLUGIN.check(options, None) if line.subject.startswith("memory"))
        assert memory.warns
        assert "allkeys-lru" in memory.fix
        with opened(server.url) as tier:
            stored = frames(200, 64 * KIB)
            results = tier.write(stored)
            refused = [result for result in results if result is not None]
            assert refused
            assert {type(result) for result in refused} == {OutOfSpaceError}
            assert "maxmemory-policy" in str(refused[0])
            found = tier.read(list(stored))
            assert [item is not None for item in found] == [result is None for result in results]
            only_misses(found, stored.values())


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_an_outage_is_an_error_of_every_key_and_heals(server: ValkeyServer, kind: str) -> None:
    """Promise 3: whatever the server does, a miss and a counted failure; it serves again without a reopen."""
    stored = frames(40)
    with opened(server.url) as tier:
        tier.put(stored)
        (server.stop if kind == "killed" else server.suspend)()
        try:
            for _ in range(3):
                assert all(isinstance(result, BackendError) for result in tier.read(list(stored)))
                assert all(isinstance(result, BackendError) for result in tier.write(stored))
        finally:
            (server.start if kind == "killed" else server.resume)()
        heals(tier, stored)


def test_a_server_that_dies_in_mid_traffic_gives_no_wrong_bytes(server: ValkeyServer) -> None:
    """Replies that were under way are lost, and none is taken for the reply of another key."""
    stored = frames(64, 16 * KIB)
    with opened(server.url) as tier:

        def work() -> None:
            tier.write(stored)
            only_misses(tier.read(list(stored)), stored.values())

        with traffic(work) as done:
            for _ in range(3):
                server.stop()
                server.start()
                before = list(done)
                until(lambda before=before: all(map(operator.gt, done, before)), "traffic after the restart")
        heals(tier, stored)


def test_chunks_expire_where_a_time_is_set(server: ValkeyServer) -> None:
    """ttl_s bounds what a cache without maxmemory keeps; without it the server's eviction decides."""
    with opened(server.url, ttl_s=1000.0) as tier, opened(server.url, prefix="other") as other:
        tier.put(frames(1))
        other.put(frames(1))
        (with_time,) = server.ask("KEYS", CHUNK_NAMES)
        (description,) = server.ask("KEYS", "tierkv:namespace:*")
        assert 0 < server.ask("PTTL", with_time) <= 1_000_000 < server.ask("PTTL", description)
        assert {server.ask("PTTL", name) for name in server.ask("KEYS", "other:*")} == {-1}


def test_other_keys_on_the_server_are_left_alone(server: ValkeyServer) -> None:
    """Teams share a server: a tier touches its own prefix and namespace alone."""
    server.ask("SET", "tierkv:notes", "else")
    with opened(server.url) as tier:
        stored = frames(10)
        tier.put(stored)
        names = {name.decode() for name in server.ask("KEYS", "*")} - {"tierkv:notes"}
        fingerprint = context().namespace.fingerprint().hex()
        description = f"tierkv:namespace:{fingerprint}"
        assert names == {description} | {f"tierkv:{fingerprint}:{key.hex()}" for key in stored}
        tier.forget(list(stored))
    assert set(server.ask("KEYS", "*")) == {b"tierkv:notes", description.encode()}


def test_a_value_that_is_too_long_is_an_error(server: ValkeyServer) -> None:
    """A foreign value under one of our names must not overrun the caller's buffer, nor its neighbours' replies."""
    with opened(server.url) as tier:
        stored = frames(3)
        tier.put(stored)
        first, second, third = stored
        name = f"tierkv:{context().namespace.fingerprint().hex()}:{second.hex()}"
        server.ask("SET", name, b"x" * (MIB))
        found = tier.read([first, second, third])
        assert isinstance(found[1], BackendError)
        assert [found[0], found[2]] == [stored[first], stored[third]]


def test_a_value_of_another_type_is_an_error_of_its_key(server: ValkeyServer) -> None:
    """A list under one of our names is a mistake of another program: its neighbours are served."""
    with opened(server.url) as tier:
        stored = frames(2)
        tier.put(stored)
        first, second = stored
        name = f"tierkv:{context().namespace.fingerprint().hex()}:{first.hex()}"
        server.ask("DEL", name)
        server.ask("RPUSH", name, "a")
        found = tier.read([first, second])
        assert isinstance(found[0], BackendError)
        assert found[1] == stored[second]
        heals(tier, stored)


def test_two_engines_share_their_chunks(server: ValkeyServer, tmp_path: Path) -> None:
    """Chunks that one engine has stored are hits in the other, without a restart."""
    ours, theirs = Prompt(1), Prompt(2)
    with small_stack(server, tmp_path) as one, small_stack(server, tmp_path) as two:
        one.store_all(ours)
        assert two.load_cold(ours) == 4
        two.store_all(theirs)
        assert one.load_cold(theirs) == 4


def test_a_stack_serves_while_its_server_is_away(server: ValkeyServer, tmp_path: Path) -> None:
    """Kill and freeze below a whole stack: misses, hits in the host tier, and hits again after the return."""
    prompt, other = Prompt(1), Prompt(2)
    with small_stack(server, tmp_path) as stack:
        stack.store_all(prompt)
        for leave, come_back in ((server.stop, server.start), (server.suspend, server.resume)):
            leave()
            stack.forget_host()
            assert stack.load_within_deadline(prompt) == 0
            stack.store(other)
            assert stack.load(other) == 4, "the host tier's own chunks"
            come_back()
            until(lambda: serves_again(stack, prompt), "hits after the return")


def test_a_server_that_refuses_reads_announces_no_hit(server: ValkeyServer, tmp_path: Path) -> None:
    """A user without GET: probes and writes succeed, and each hit would be a load that fails. Reads alone end that."""
    prompts = [Prompt(number) for number in range(4)]
    with small_stack(server, tmp_path, tier={"breaker_failures": 3}) as stack:
        stack.store_all(*prompts)
        server.ask("ACL", "SETUSER", "default", "-get", "-mget")
        for number, prompt in enumerate(prompts[:3]):
            assert stack.load_cold(prompt) == 0
            stack.store_all(Prompt(10 + number))
        assert not stack.stack.tiers.health()[TESTED].usable
        calls = stack.faulty.calls.count("read_into")
        assert stack.load_cold(prompts[3]) == 0
        assert stack.faulty.calls.count("read_into") == calls
        server.ask("ACL", "SETUSER", "default", "allcommands")
        stack.until_usable()
        assert stack.load_cold(prompts[3]) == 4


def test_one_slow_command_costs_no_hit(tmp_path: Path) -> None:
    """It blocks the server past the tier's timeout. The framework's next try finds the answer, if the node is asked."""
    stored = frames(20)
    with ValkeyServer(tmp_path, *CACHE, "--enable-debug-command", "yes") as server, opened(server.url) as tier:
        tier.put(stored)
        blocker = threading.Thread(target=server.ask, args=("DEBUG", "SLEEP", "0.9"))
        blocker.start()
        until(lambda: any(isinstance(result, TierKVError) for result in tier.read(list(stored))), "timeout")
        assert tier.read(list(stored)) == list(stored.values())
        blocker.join()


def test_a_server_that_is_not_there_is_named_at_open(server: ValkeyServer) -> None:
    """The error of an open names the server and a fix, and is one that the framework retries."""
    server.stop()
    with pytest.raises(BackendUnavailableError, match=f"{server.port}.*Check that the server runs"):
        opened(server.url)


def test_a_handshake_makes_no_list_that_a_reply_only_announces(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's default is hiredis, if it is installed. For the reply `*2147483647` it makes a list of as many
    places at once, and no thread of the engine ran for 57 s."""
    init, default = inspect.unwrap(AbstractConnection.__init__), redis.connection.DefaultParser
    defaults = init.__defaults__ or ()
    assert default in defaults
    monkeypatch.setattr(init, "__defaults__", tuple(None if each is default else each for each in defaults))
    with opened(server.url) as tier:
        tier.put(frames(1))


def test_a_late_reply_is_not_taken_for_that_of_the_next_key(server: ValkeyServer) -> None:
    """A frozen server answers everything when it wakes up: the reply to a call that was given up must not be read."""
    first, second = frames(2).items()
    with opened(server.url, timeout_s=1.0) as tier:
        tier.put(dict((first, second)))
        server.suspend()
        try:
            assert isinstance(tier.read([first[0]])[0], TierKVError)
            time.sleep(REST_S + 0.1)
            found: list[object] = []
            reader = threading.Thread(target=lambda: found.extend(tier.read([second[0]])))
            reader.start()
            time.sleep(0.1)
        finally:
            server.resume()
        reader.join(30.0)
        only_misses(found, [second[1]])
