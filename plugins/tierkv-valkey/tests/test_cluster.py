"""A cluster of three primaries: slots, nodes that die, freeze and return, and slots that move."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot
from valkey_servers import ValkeyCluster, ValkeyServer, until
from valkey_support import context, frames, heals, only_misses, opened, traffic

import tierkv_valkey
from tierkv.errors import BackendUnavailableError, DeadlineExceededError, TierKVError
from tierkv.testing.conformance.session import Session
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.types.keys import Key
from tierkv_valkey import ValkeyOptions

RIGHTS = {"rights": ("-exists", "-get", "-set", "-unlink"), "reads": ("-get",)}
"""Changes of a user's rights."""


@pytest.fixture
def tier(cluster: ValkeyCluster) -> Iterator[Session]:
    """A tier on the cluster."""
    with opened(cluster.url, mode="cluster") as session:
        yield session


def name_of(key: Key) -> bytes:
    """Name of a key on the server."""
    return f"tierkv:{context().namespace.fingerprint().hex()}:{key.hex()}".encode()


def keys_of(cluster: ValkeyCluster, node: ValkeyServer, keys: list[Key]) -> set[Key]:
    """Keys whose slots a node owns."""
    return {key for key in keys if cluster.owner(name_of(key)) is node}


def test_the_chunks_of_a_prompt_spread_over_all_nodes(cluster: ValkeyCluster, tier: Session) -> None:
    """A hash tag would put a namespace on one node: a cluster of ten would be as large and fast as one server."""
    tier.put(frames(300))
    counts = [len(node.ask("KEYS", "tierkv:*:*")) for node in cluster.nodes]
    assert sum(counts) == 300 + 1, "a name is neither a chunk nor the description of the namespace"
    assert min(counts) > 50, counts
    assert len({key_slot(name) for name in cluster.names()}) > 250


def test_a_dead_node_costs_its_own_keys_alone(cluster: ValkeyCluster, tier: Session) -> None:
    """With full coverage off, two thirds of a prompt are hits while a node is dead, in the same calls."""
    stored = frames(90)
    tier.put(stored)
    dead = cluster.nodes[1]
    lost = keys_of(cluster, dead, list(stored))
    dead.stop()
    for key, result in zip(stored, tier.read(list(stored)), strict=True):
        if key in lost:
            assert isinstance(result, BackendUnavailableError | DeadlineExceededError), result
            assert str(dead.port) in str(result), "the message does not name the node"
        else:
            assert result == stored[key]
    dead.start()
    cluster.until_whole()
    heals(tier, stored)


def test_a_stack_stores_on_living_nodes_for_as_long_as_one_is_dead(cluster: ValkeyCluster, tmp_path: Path) -> None:
    """Requests compute what the dead node had again and again: writes to it fail in a row, the others must not end."""
    dead = cluster.nodes[1]
    options = ValkeyOptions(url=cluster.url, mode="cluster", timeout_s=0.5)
    tier = {"breaker_failures": 3}
    with SmallStack(tierkv_valkey.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None, tier=tier) as stack:
        stack.store_all(*(Prompt(number) for number in range(8)))
        dead.stop()
        for _ in range(3):
            for number in range(8):
                stack.load_cold(Prompt(number))
                stack.store(Prompt(number))
                stack.settle()
            stack.pass_time(10.0)
        assert stack.stack.tiers.health()[TESTED] == (True, True, False)
        living = [node for node in cluster.nodes if node is not dead]
        before = sum(node.ask("DBSIZE") for node in living)
        stack.store(Prompt(100, 8))
        stack.settle()
        assert sum(node.ask("DBSIZE") for node in living) > before


@pytest.mark.parametrize("kind", ["password", *RIGHTS, "script"])
def test_a_node_that_refuses_costs_its_own_keys_alone(cluster: ValkeyCluster, tmp_path: Path, kind: str) -> None:
    """One node was replaced and lacks the user, or some of its rights, or runs a long script: the chunks of the others
    stay hits."""
    options = ValkeyOptions(url=cluster.url, mode="cluster", timeout_s=0.5)
    prompts = [Prompt(number, 1) for number in range(24)]
    node = cluster.nodes[1]
    with SmallStack(
        tierkv_valkey.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None, tier={"breaker_failures": 3}
    ) as stack:
        stack.store_all(*prompts)
        name = f"tierkv:{stack.context.namespace.fingerprint().hex()}:"
        lost = [prompt for prompt in prompts if cluster.owner(f"{name}{prompt.keys[0].hex()}".encode()) is node]
        with refusing(node, kind):
            for _ in range(3):
                found = [prompt for prompt in prompts if stack.load_cold(prompt)]
                stack.pass_time(60.0)  # answers to lookups are kept no longer
            assert found == [prompt for prompt in prompts if prompt not in lost]
            assert stack.stack.tiers.health()[TESTED] == (True, True, False)
        until(lambda: stack.pass_time(60.0) or all(map(stack.load_cold, lost)), "hits after the end")


@contextmanager
def refusing(node: ValkeyServer, kind: str) -> Iterator[None]:
    """Within the block, a node answers every command with an error; the other nodes still hold it for alive."""
    if kind == "password":
        node.ask("CONFIG", "SET", "requirepass", "of-others")
        node.password = "of-others"
        node.ask("CLIENT", "KILL", "TYPE", "normal")
        yield
        node.ask("CONFIG", "SET", "requirepass", "")
        node.password = None
    elif kind in RIGHTS:
        node.ask("ACL", "SETUSER", "default", *RIGHTS[kind])
        yield
        node.ask("ACL", "SETUSER", "default", "allcommands")
    else:
        node.ask("CONFIG", "SET", "busy-reply-threshold", "100")
        node.ask("CONFIG", "SET", "cluster-node-timeout", "60000")
        script = threading.Thread(target=_run_endless_script, args=(node,))
        script.start()
        until(lambda: _is_busy(node), "long script")
        yield
        node.ask("SCRIPT", "KILL")
        script.join()


def _run_endless_script(node: ValkeyServer) -> None:
    with pytest.raises(redis.ResponseError):
        node.ask("EVAL", "while true do end", 0)


def _is_busy(node: ValkeyServer) -> bool:
    try:
        node.ask("PING")
    except redis.exceptions.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_a_node_that_leaves_and_returns_is_logged_once_each(
    cluster: ValkeyCluster, tier: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier stays in service, so its own lines say nothing: an operator has to learn which server is gone."""

    def lines() -> list[str]:
        return [line for line in caplog.messages if f"node 127.0.0.1:{dead.port} " in line]

    stored, dead = frames(90), cluster.nodes[1]
    tier.put(stored)
    dead.stop()
    until(lambda: tier.read(list(stored)) and lines(), "line about the dead node")
    for _ in range(20):
        tier.read(list(stored))
    assert len(lines()) == 1
    assert "does not serve; its chunks are misses" in lines()[0]
    dead.start()
    cluster.until_whole()
    heals(tier, stored)
    assert len(lines()) == 2
    assert "serves again, after" in lines()[1]


def test_nodes_that_all_die_take_the_tier_out(cluster: ValkeyCluster, tmp_path: Path) -> None:
    """Nothing serves then: requests must not wait for one node after the other."""
    options = ValkeyOptions(url=cluster.url, mode="cluster", timeout_s=0.5)
    tier = {"breaker_failures": 3}
    with SmallStack(tierkv_valkey.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None, tier=tier) as stack:
        stack.store_all(*(Prompt(number) for number in range(8)))
        cluster.nodes[1].stop()
        stack.load_cold(Prompt(0))
        cluster.stop()
        for number in range(8):
            stack.load_cold(Prompt(number))
        assert not stack.stack.tiers.health()[TESTED].usable


def test_a_frozen_node_costs_its_own_keys_alone(cluster: ValkeyCluster, tier: Session) -> None:
    """A stopped process still has its sockets: with a client's defaults, one read once took 22.5 s."""
    stored = frames(90)
    tier.put(stored)
    frozen = cluster.nodes[2]
    lost = keys_of(cluster, frozen, list(stored))
    frozen.suspend()
    try:
        for _ in range(3):
            for key, result in zip(stored, tier.read(list(stored)), strict=True):
                assert isinstance(result, TierKVError) if key in lost else result == stored[key]
    finally:
        frozen.resume()
    cluster.until_whole()
    heals(tier, stored)


def test_with_full_coverage_one_dead_node_ends_all_slots(tmp_path: Path) -> None:
    """The server's default: all keys are errors, never wrong; check warns about the setting, and the tier heals."""
    with ValkeyCluster(tmp_path / "strict", "--cluster-require-full-coverage", "yes") as cluster:
        options = ValkeyOptions(url=cluster.url, mode="cluster", timeout_s=0.5)
        assert tierkv_valkey.PLUGIN.check is not None
        found = [line for line in tierkv_valkey.PLUGIN.check(options, None) if line.subject.startswith("slots")]
        assert len(found) == 3
        assert all(line.warns and "cluster-require-full-coverage to no" in line.fix for line in found)
        stored = frames(60)
        with opened(cluster.url, mode="cluster") as tier:
            tier.put(stored)
            cluster.nodes[0].stop()
            until(lambda: only_misses(tier.read(list(stored)), stored.values()) == 0, "refusal of the other nodes")
            cluster.nodes[0].start()
            cluster.until_whole()
            heals(tier, stored)


def move_slot(cluster: ValkeyCluster, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
    """Move one slot, key by key, as the server's own tool does."""
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.identity(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.identity(target))
    while names := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
    for node in (target, source, *cluster.nodes):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.identity(target))


def test_slots_move_while_they_are_read(cluster: ValkeyCluster, tier: Session, rng: random.Random) -> None:
    """Growing a cluster is daily work: no chunk is missing or wrong meanwhile."""
    stored = frames(200)
    tier.put(stored)
    source, target = cluster.nodes[0], cluster.nodes[1]
    names = source.ask("KEYS", "*")
    slots = rng.sample(sorted({key_slot(name) for name in names}), 20)
    keys = list(stored)
    with traffic(lambda: _all_there(tier, keys, stored)) as done:
        for slot in slots:
            move_slot(cluster, slot, source, target)
    assert all(done), done
    assert {key_slot(name) for name in target.ask("KEYS", "*")} >= set(slots)
    _all_there(tier, keys, stored)


def test_a_key_that_has_moved_ahead_of_its_slot_is_found(cluster: ValkeyCluster, tier: Session) -> None:
    """While a slot moves, its two nodes have some keys each: the reply ASK names the other for one command."""
    stored = frames(60)
    tier.put(stored)
    key = next(iter(stored))
    source = cluster.owner(name_of(key))
    target = next(node for node in cluster.nodes if node is not source)
    slot = key_slot(name_of(key))
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.identity(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.identity(target))
    source.ask("MIGRATE", "127.0.0.1", target.port, name_of(key), 0, 5000)
    assert tier.read(list(stored)) == list(stored.values())
    assert tier.contains(list(stored)) == [True] * 60
    tier.forget([key])
    assert tier.contains([key]) == [False]
    move_slot(cluster, slot, source, target)


def test_a_client_starts_while_a_seed_is_dead(cluster: ValkeyCluster) -> None:
    """An engine that starts during an outage finds the cluster by any living node of the URL."""
    cluster.nodes[0].stop()
    stored = frames(60)
    with opened(cluster.url, mode="cluster") as tier:
        results = tier.write(stored)
        assert None in results
        assert all(result is None or isinstance(result, TierKVError) for result in results)


def test_an_unknown_seed_is_named(cluster: ValkeyCluster) -> None:
    """Without any living seed, the error has the URL and a fix."""
    cluster.stop()
    with pytest.raises(BackendUnavailableError, match="Check that the server runs") as error:
        opened(cluster.url, mode="cluster")
    assert cluster.url in str(error.value)


def _all_there(tier: Session, keys: list[Key], stored: dict[Key, bytes]) -> None:
    found = tier.read(keys)
    assert found == list(stored.values()), [item for item in found if not isinstance(item, bytes)][:3]
