"""Tools on a Valkey tier: what is listed, what is removed, and what they say where they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from valkey_servers import ValkeyCluster, ValkeyServer
from valkey_support import CHUNK_NAMES, context, frames, opened

import tierkv_valkey
from tierkv.abc import DamagedEntry, StoredFrame, StoredNamespace
from tierkv.cli.main import cli
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key
from tierkv_valkey import ValkeyOptions
from tierkv_valkey.backend import ValkeyBackend
from tierkv_valkey.descriptions import REPEAT_S, Description
from tierkv_valkey.opening import open_backend, open_directory

FINGERPRINT = context().namespace.fingerprint().hex()
DESCRIPTION = f"tierkv:namespace:{FINGERPRINT}"


def tierkv(*words: object) -> Result:
    """Run the program in this process."""
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="tierkv")


def listed(url: str, **options: Any) -> list[StoredFrame | DamagedEntry]:
    """Entries of the namespace of these tests."""
    backend = open_backend(context(), ValkeyOptions(url=url, **options))
    try:
        return list(backend.list_frames(keys=True))
    finally:
        backend.close()


def namespaces(url: str, **options: Any) -> list[StoredNamespace | TierKVError]:
    """Namespaces under the prefix."""
    at_rest = tierkv_valkey.PLUGIN.at_rest
    assert at_rest is not None
    return list(at_rest.namespaces(ValkeyOptions(url=url, timeout_s=0.5, **options)))


def test_a_cluster_is_listed_page_by_page(cluster: ValkeyCluster) -> None:
    """A tier has more chunks than a page, on every node: each is listed once, with its length."""
    stored = frames(4000, 200)
    with opened(cluster.url, mode="cluster") as tier:
        tier.put(stored)
    found = listed(cluster.url, mode="cluster")
    assert all(isinstance(each, StoredFrame) for each in found)
    assert {(each.key, each.frame_bytes) for each in cast("list[StoredFrame]", found)} == {
        (key, len(frame)) for key, frame in stored.items()
    }
    assert len(found) == len(stored)
    assert namespaces(cluster.url, mode="cluster") == [StoredNamespace(context().namespace)]


def test_the_commands_list_and_empty_a_cluster(cluster: ValkeyCluster, tmp_path: Path) -> None:
    """An operator has the stack file: chunks by model, and none of it after the model is gone."""
    stack = tmp_path / "stack.json"
    tier = {"backend": "valkey", "url": cluster.url, "mode": "cluster"}
    stack.write_text(json.dumps({"host": {"capacity": "1MiB"}, "tiers": [tier]}), encoding="utf-8")
    stored = frames(300, 200)
    with opened(cluster.url, mode="cluster") as session, opened(cluster.url, mode="cluster", prefix="else") as other:
        session.put(stored)
        other.put(frames(5))
        said = tierkv("ls", stack, "--json")
        assert said.exit_code == 0, said.output
        (row,) = json.loads(said.stdout)["namespaces"]
        assert (row["model"], row["chunks"], row["frame_bytes"]) == ("m", 300, sum(map(len, stored.values())))
        said = tierkv("rm", stack, "-n", "m", "--yes")
        assert said.exit_code == 0, said.output
        assert session.read(list(stored)) == [None] * 300
        assert len([name for name in cluster.names() if name.startswith(b"else:")]) == 5 + 1
        assert [name for name in cluster.names() if name.startswith(b"tierkv:")] == []


def test_a_dead_node_is_named(cluster: ValkeyCluster) -> None:
    """A list without the chunks of one node would be taken for the whole."""
    with opened(cluster.url, mode="cluster") as tier:
        tier.put(frames(30))
    dead = cluster.nodes[1]
    dead.stop()
    try:
        with pytest.raises(BackendError, match=r"(Check that the server runs|Check the server)"):
            listed(cluster.url, mode="cluster", connect_timeout_s=0.2, timeout_s=0.5)
        with pytest.raises(BackendError, match="cannot list"):
            namespaces(cluster.url, mode="cluster")
    finally:
        cluster.start_dead()


def test_what_is_no_chunk_is_damage(server: ValkeyServer) -> None:
    """A value that another program put under our names is shown, can be removed, and hides no chunk."""
    with opened(server.url) as tier:
        stored = frames(3)
        tier.put(stored)
        server.ask("SET", f"tierkv:{FINGERPRINT}:notes", "x")
        server.ask("RPUSH", f"tierkv:{FINGERPRINT}:abcd", "x")
        backend = open_backend(context(), ValkeyOptions(url=server.url))
        found = list(backend.list_frames(keys=True))
        damage = {each.where.rpartition(":")[2]: each for each in found if isinstance(each, DamagedEntry)}
        assert {name: each.reason for name, each in damage.items()} == {
            "notes": "its name has no chunk key",
            "abcd": "its value is not text",
        }
        assert len(found) == len(stored) + len(damage)
        for each in damage.values():
            assert each.remove is not None
            each.remove()
        backend.close()
        assert len(server.ask("KEYS", CHUNK_NAMES)) == len(stored)


def test_an_evicted_description_is_reported_and_comes_back(server: ValkeyServer) -> None:
    """A full server evicts any value. Chunks without a model are shown as such, and writers describe them again."""
    now_s = [0.0]
    backend = ValkeyBackend(
        open_directory(ValkeyOptions(url=server.url)),
        prefix=f"tierkv:{FINGERPRINT}:".encode(),
        tier="t",
        ttl_s=None,
        timeout_s=1.0,
        description=Description.of("tierkv", context().namespace),
        clock=lambda: now_s[0],
    )
    with opened(server.url) as tier:
        tier.put(frames(1))
    server.ask("DEL", DESCRIPTION)
    (error,) = namespaces(server.url)
    assert isinstance(error, BackendError)
    assert f"chunks of {FINGERPRINT}" in str(error)
    backend.write([])
    assert namespaces(server.url) == [StoredNamespace(context().namespace)]
    server.ask("DEL", DESCRIPTION)
    now_s[0] = REPEAT_S - 1
    backend.write([])
    assert server.ask("EXISTS", DESCRIPTION) == 0, "each write costs a message more"
    now_s[0] = REPEAT_S
    backend.write([])
    assert namespaces(server.url) == [StoredNamespace(context().namespace)]
    backend.close()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"namespace": {"model": 3}}'])
def test_a_damaged_description_is_an_error_of_its_namespace(server: ValkeyServer, content: bytes) -> None:
    """Other namespaces are listed."""
    with opened(server.url) as tier:
        tier.put(frames(1))
        server.ask("SET", f"tierkv:namespace:{'0' * 32}", content)
        first, second = namespaces(server.url)
    assert isinstance(first, BackendError)
    assert "is damaged" in str(first)
    assert second == StoredNamespace(context().namespace)


def test_a_tier_that_only_reads_leaves_no_trace(server: ValkeyServer) -> None:
    """A stack with `write = "read_only"` opens the tier as any other does: only a write may describe the namespace."""
    with opened(server.url) as tier:
        stored = frames(3)
        assert tier.read(list(stored)) == [None] * 3
        assert tier.contains(list(stored)) == [False] * 3
    assert server.ask("KEYS", "*") == []
    with opened(server.url) as tier:
        tier.put(stored)
    assert server.ask("EXISTS", DESCRIPTION) == 1


def test_tools_that_read_leave_no_trace(server: ValkeyServer) -> None:
    """A user who may only read can list; one without SCAN gets the names of the missing commands."""
    with opened(server.url) as tier:
        tier.put(frames(3))
    server.ask("DEL", DESCRIPTION)
    at_rest = tierkv_valkey.PLUGIN.at_rest
    assert at_rest is not None
    assert at_rest.open_reader is not None
    reader = cast("ValkeyBackend", at_rest.open_reader(context(), ValkeyOptions(url=server.url)))
    assert len(list(reader.list_frames(keys=False))) == 3
    reader.close()
    assert server.ask("EXISTS", DESCRIPTION) == 0
    server.ask("ACL", "SETUSER", "default", "-scan")
    with pytest.raises(BackendError, match=r"access is refused.*scan and strlen"):
        namespaces(server.url)
    server.ask("ACL", "SETUSER", "default", "-set")
    with opened(server.url) as tier:
        assert tier.read([Key(b"absent")]) == [None]


def test_a_description_is_that_of_the_first_release() -> None:
    """Tools of another version read it, under the name that they look for."""
    namespace = context().namespace
    description = Description.of("tierkv", namespace)
    assert description.name.decode() == DESCRIPTION
    assert json.loads(description.content) == {
        "format": "tierkv-valkey",
        "version": 1,
        "namespace": json.loads(json.dumps(namespace.describe())),
    }
