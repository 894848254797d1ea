"""Options, messages, secrets, checks, and how a node rests."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from redis import exceptions
from valkey_servers import ValkeyCluster, ValkeyServer, until
from valkey_support import context, frames, heals, opened

import tierkv_valkey
from tierkv.abc import CheckResult
from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError
from tierkv.tiers.results import explain
from tierkv_valkey import ValkeyOptions
from tierkv_valkey.failures import FIXES, Failure, FailureKind
from tierkv_valkey.nodes.node import REST_S_MAX, Node, RestingError
from tierkv_valkey.nodes.wire import Wire
from tierkv_valkey.opening import PROBE
from tierkv_valkey.options import Address, Location

PASSWORD = "the-secret-of-the-tests"
BAD_URLS = {
    "10.0.0.7:6379": "give a URL like",
    "http://10.0.0.7": "give a URL like",
    "valkey://": "a host is missing",
    "valkey://a,,b": "a host is missing",
    "valkey://host:0": "is no port",
    "valkey://host:70000": "is no port",
    "valkey://host:port": "is no port",
    "valkey://host port": "is no port",
    "valkey://host/first": "database number",
    "valkey://host/0/1": "database number",
    "valkey://host?ssl=1": "no query",
    "valkey://host#part": "no query",
}
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "clustr"}, '"single", "sentinel" and "cluster"'),
    ({"url": "valkey://a,b"}, 'need mode = "cluster"'),
    ({"url": "valkey://a/1", "mode": "cluster"}, "database 0 alone"),
    ({"mode": "sentinel"}, "service = None"),
    ({"service": "kv"}, "service = 'kv'"),
    ({"prefix": "a{b}"}, "one slot"),
    ({"prefix": ""}, "prefix = ''"),
    ({"prefix": "p" * 65}, "1 to 64"),
    ({"connect_timeout_s": 0.0}, "connect_timeout_s = 0.0"),
    ({"timeout_s": float("nan")}, "timeout_s = nan"),
    ({"ttl_s": 0.5}, "ttl_s = 0.5"),
    ({"ca_file": "/none"}, "only for TLS"),
    ({"url": "valkeys://a", "ca_file": "/none"}, "no such file"),
    ({"url": "valkeys://a", "cert_file": __file__}, "give both"),
]


def checked(url: str, **options: Any) -> dict[str, CheckResult]:
    """Results of the check by subject."""
    assert tierkv_valkey.PLUGIN.check is not None
    found = list(tierkv_valkey.PLUGIN.check(ValkeyOptions(url=url, **options), None))
    return {line.subject.partition(" of ")[0].partition(" to ")[0]: line for line in found}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_wrong_url_names_the_mistake(url: str) -> None:
    """The message repeats the URL and says what is wrong with it."""
    with pytest.raises(ValueError, match=BAD_URLS[url]) as error:
        ValkeyOptions(url=url, mode="cluster")
    assert url in str(error.value)


@pytest.mark.parametrize("url", ["valkey://user:hunter2@host", "rediss://:hunter2@host", "hunter2@host:1"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    """A configuration is committed, mailed and logged: the message names the way out, not the password."""
    with pytest.raises(ValueError, match="password_env") as error:
        ValkeyOptions(url=url)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_wrong_options_name_the_fix(options: dict[str, Any], message: str) -> None:
    """Key, value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        ValkeyOptions(**{"url": "valkey://host", **options})


def test_urls_of_every_kind_are_understood() -> None:
    """Names, numbers of both versions, default ports, databases, and the schemes of both projects."""
    location = Location.parse("rediss://a.example.com,10.0.0.7:7000,[fe80::1]:7001/3", 6379)
    assert location.addresses == (Address("a.example.com", 6379), Address("10.0.0.7", 7000), Address("fe80::1", 7001))
    assert (location.database, location.tls) == (3, True)
    assert [str(address) for address in location.addresses][-1] == "[fe80::1]:7001"
    sentinel = ValkeyOptions(url="valkey://a,b", mode="sentinel", service="kv").location
    assert [address.port for address in sentinel.addresses] == [26379, 26379]
    assert not sentinel.tls


def test_a_password_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right password, none, and a wrong one; the check says which variable was read."""
    with ValkeyServer(tmp_path / "server", password=PASSWORD) as server:
        with pytest.raises(BackendError, match=r"wants a password.*password_env"):
            opened(server.url)
        assert not checked(server.url)["access"].ok
        monkeypatch.setenv("TIERKV_VALKEY_PASSWORD", "wrong")
        with pytest.raises(BackendError, match="wants a password, or refuses it"):
            opened(server.url)
        monkeypatch.setenv("TIERKV_VALKEY_PASSWORD", PASSWORD)
        with opened(server.url) as tier:
            tier.put(frames(3))
        assert "TIERKV_VALKEY_PASSWORD" in checked(server.url)["login"].detail
        monkeypatch.setenv("TEAM_B", PASSWORD)
        monkeypatch.delenv("TIERKV_VALKEY_PASSWORD")
        with opened(server.url, password_env="TEAM_B") as tier:
            tier.put(frames(3))
        assert not checked(server.url, username="someone")["login"].ok


def test_a_password_in_a_file_may_be_replaced(tmp_path: Path) -> None:
    """The environment of a process keeps the password of its start: engines had to be restarted with a new one."""
    file = tmp_path / "password"
    with pytest.raises(ValueError, match="no such file"):
        ValkeyOptions(url="valkey://127.0.0.1", password_file=str(file))
    file.write_text(f"{PASSWORD}\n", encoding="utf-8")
    with ValkeyServer(tmp_path / "server", password=PASSWORD) as server:
        with opened(server.url, password_file=str(file)) as tier:
            stored = frames(3)
            tier.put(stored)
            server.ask("CONFIG", "SET", "requirepass", "another")
            server.password = "another"
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            assert any("wants a password" in str(error) for error in tier.write(stored))
            file.unlink()
            assert any("No such file" in str(error) for error in tier.write(stored)), "and no exception"
            file.write_text("another\n", encoding="utf-8")
            heals(tier, stored)
        assert str(file) in checked(server.url, password_file=str(file))["login"].detail


def test_no_message_has_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors, checks and logs are mailed around: none has the password, whatever fails."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TIERKV_VALKEY_PASSWORD", PASSWORD)
    texts: list[str] = []
    with ValkeyServer(tmp_path / "server", password="another") as server:
        with pytest.raises(BackendError) as refused:
            opened(server.url)
        texts += [str(refused.value), repr(refused.value), *map(repr, checked(server.url).values())]
        with pytest.raises(BackendError) as refused:
            opened(server.url, username="someone")
        texts.append(str(refused.value))
    with ValkeyServer(tmp_path / "second", password=PASSWORD) as server:
        with opened(server.url) as tier:
            tier.put(frames(2))
            texts += [repr(vars(tier.backend)), repr(tier.backend)]
            server.ask("CONFIG", "SET", "maxmemory", "1mb", "maxmemory-policy", "noeviction")
            texts += map(str, tier.write(frames(40, 64 << 10)))
            server.stop()
            texts += map(str, tier.write(frames(2)))
        texts += map(repr, checked(server.url).values())
        texts.append(repr(ValkeyOptions(url=server.url)))
    assert any("no connection" in text for text in texts)
    assert not [text for text in (*texts, caplog.text) if PASSWORD in text]


def test_a_user_with_five_commands_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's access control list serves a tier; the check says which settings it cannot see."""
    with ValkeyServer(tmp_path / "server") as server:
        rule = ["+get", "+set", "+exists", "+unlink", "+ping", "~tierkv:*"]
        server.ask("ACL", "SETUSER", "tierkv", "on", f">{PASSWORD}", *rule)
        monkeypatch.setenv("TIERKV_VALKEY_PASSWORD", PASSWORD)
        with opened(server.url, username="tierkv") as tier:
            stored = frames(5)
            tier.put(stored)
            assert tier.read(list(stored)) == list(stored.values())
            assert tier.contains(list(stored)) == [True] * 5
            tier.forget(list(stored))
        with opened(server.url, username="tierkv", prefix="other") as tier:
            (result,) = tier.write(frames(1))
            assert isinstance(result, BackendError)
            assert "access is refused" in str(result)
        server.ask("ACL", "SETUSER", "tierkv", "+info")
        found = checked(server.url, username="tierkv")
        assert found["write"].ok
        assert found["settings"].warns
        assert "CONFIG GET" in found["settings"].detail


def test_the_check_finds_what_a_cache_should_not_have(tmp_path: Path) -> None:
    """No bound, snapshots, a policy that evicts nothing: each is a warning with the setting to change."""
    options = ("--maxmemory", "0", "--save", "900 1", "--appendonly", "yes")
    with ValkeyServer(tmp_path / "server", *options) as server:
        found = checked(server.url)
        assert found["memory"].warns
        assert "maxmemory" in found["memory"].fix
        assert found["persistence"].warns
        assert "appendonly" in found["persistence"].fix
        server.ask("CONFIG", "SET", "maxmemory", "64mb", "maxmemory-policy", "volatile-lru", "save", "")
        server.ask("CONFIG", "SET", "appendonly", "no")
        assert "ttl_s" in checked(server.url)["memory"].fix
        found = checked(server.url, ttl_s=60.0)
        assert not [line for line in found.values() if line.warns or not line.ok]
        assert server.ask("KEYS", "*") == []


@pytest.mark.parametrize(("mode", "more"), [("cluster", {}), ("sentinel", {"service": "kv"})])
def test_another_mode_is_named(server: ValkeyServer, mode: str, more: dict[str, str]) -> None:
    """A single server behind mode = "cluster" or "sentinel": the message says what to change."""
    with pytest.raises(BackendError, match="Set the tier's mode"):
        opened(server.url, mode=mode, **more)
    assert "mode" in checked(server.url, mode=mode, **more)["access"].fix


def test_a_cluster_as_a_single_server_is_named(cluster: ValkeyCluster) -> None:
    """Redirects of a cluster are no misses: open and verbs say that the mode is wrong."""
    owner = cluster.owner(PROBE)
    with opened(owner.url) as tier:
        wrong = [result for result in tier.write(frames(30)) if result is not None]
        assert wrong
        assert all("Set the tier's mode" in str(result) for result in wrong)
    other = next(node for node in cluster.nodes if node is not owner)
    with pytest.raises(BackendError, match="Set the tier's mode"):
        opened(other.url)


def test_every_kind_of_failure_has_a_fix() -> None:
    """A message without a fix leaves the user alone."""
    assert set(FIXES) == set(FailureKind)
    assert all(FIXES.values())


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (exceptions.OutOfMemoryError("command not allowed"), FailureKind.FULL, OutOfSpaceError),
        (exceptions.ConnectionError("refused"), FailureKind.DOWN, BackendUnavailableError),
        (exceptions.ResponseError("MISCONF Errors writing to the disk"), FailureKind.BUSY, BackendUnavailableError),
        (exceptions.BusyLoadingError("loading"), FailureKind.BUSY, BackendUnavailableError),
        (ConnectionResetError("reset"), FailureKind.DOWN, BackendUnavailableError),
        (ValueError("x" * 1000), FailureKind.OTHER, BackendError),
    ],
)
def test_failures_are_classified(error: Exception, kind: FailureKind, expected: type[Exception]) -> None:
    """Retries and eviction follow from the type: only a full server may be called full."""
    failure = Failure.of(error)
    assert failure.kind is kind
    assert len(failure.detail) < 250
    assert type(failure.to_error("x", tier="t")) is expected


def test_a_node_rests_longer_each_time_and_one_caller_tries() -> None:
    """A frozen node must not cost every call its timeout: between two tries its keys fail at once. Not after the first,
    as the server may be busy with one slow command; calls that waited side by side are one."""
    now_s, asked = 0.0, []

    def connect() -> Wire:
        asked.append(now_s)
        return cast("Wire", None)

    node = Node(Address("a", 1), connect, 1.0, clock=lambda: now_s)
    pauses = []
    for _ in range(4):
        node.was_late(begun_s=-1.0)
        node.take_wire()
        node.take_wire()
    asked.clear()
    for _ in range(5):
        node.was_late(begun_s=now_s)
        begun_s = now_s
        while node.is_resting:
            with pytest.raises(RestingError):
                node.take_wire()
            now_s += 0.25
        pauses.append(now_s - begun_s)
        before = len(asked)
        node.take_wire()
        with pytest.raises(RestingError):
            node.take_wire()
        assert len(asked) == before + 1
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert max(pauses) == REST_S_MAX
    node.answered(b"GET")
    node.take_wire()
    node.take_wire()


def test_a_closed_tier_says_so(server: ValkeyServer) -> None:
    """A late call after the close is an error of the tier, not of the server."""
    session = opened(server.url)
    session.close()
    with pytest.raises(BackendError, match="is closed"):
        session.backend.contains([next(iter(frames(1)))])


def test_connections_end_with_the_tier(server: ValkeyServer) -> None:
    """Engines restart all day: the server must not collect their connections."""
    for _ in range(3):
        with opened(server.url) as tier:
            tier.put(frames(3))
    until(lambda: server.reply("CLIENT", "LIST").count(b"\n") == 1, "end of all connections but the test's own")


def test_it_is_registered() -> None:
    """The entry point works in a fresh process."""
    program = "from tierkv.plugins.loading import load_plugins; print(load_plugins().backends['valkey'].plugin.summary)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert "Sentinel" in done.stdout
    assert context().tier == "remote"


@pytest.mark.parametrize("kind", list(FailureKind))
def test_the_log_shows_the_fix(kind: FailureKind) -> None:
    """A message ends with the fix, behind a long name and the server's words; the log once cut it off."""
    name = f"tierkv:{'a' * 32}:{'b' * 72} at valkey-primary.example.org:6379"
    error = Failure(kind, f"{'E' * 20}: {'words ' * 20}").to_error(f"cannot look for {name}", tier="remote")
    assert explain(error).endswith(FIXES[kind][1:])
