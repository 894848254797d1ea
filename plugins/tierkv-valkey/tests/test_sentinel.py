"""A primary with a replica, watched by a sentinel: the tier follows a failover, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from valkey_servers import ValkeyServer, free_port, until
from valkey_support import CHUNK_NAMES, frames, heals, only_misses, opened

from tierkv.errors import BackendError, BackendUnavailableError

SERVICE = "kv"
CONFIGURATION = """
port {port}
bind 127.0.0.1
sentinel monitor kv 127.0.0.1 {primary} 1
sentinel down-after-milliseconds kv 500
sentinel failover-timeout kv 2000
"""


@dataclass
class Watched:
    primary: ValkeyServer
    replica: ValkeyServer
    sentinel: ValkeyServer


class Sentinel(ValkeyServer):
    """The same program in its other role."""

    def command(self) -> list[str]:
        program = super().command()[0]
        return [program, str(self.folder / "sentinel.conf"), "--sentinel"]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A primary, a replica, and a sentinel that knows both."""
    with ValkeyServer(tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary:
        follows = ("--replicaof", f"127.0.0.1 {primary.port}")
        with ValkeyServer(tmp_path / "replica", *follows) as replica:
            until(lambda: b"master_link_status:up" in replica.reply("INFO", "replication"), "replication")
            folder, port = tmp_path / "sentinel", free_port()
            folder.mkdir()
            (folder / "sentinel.conf").write_text(CONFIGURATION.format(port=port, primary=primary.port))
            with Sentinel(folder, port=port) as sentinel:
                sentinel.ask("SENTINEL", "DEBUG", "info-period", 200)  # it would look at the servers every 10 s
                until(lambda: sentinel.ask("SENTINEL", "REPLICAS", SERVICE), "sentinel that knows the replica")
                yield Watched(primary, replica, sentinel)


def test_the_tier_follows_a_failover(watched: Watched) -> None:
    """The primary dies, the sentinel promotes the replica: the tier uses it without a reopen."""
    stored = frames(30)
    with opened(watched.sentinel.url, mode="sentinel", service=SERVICE) as tier:
        tier.put(stored)
        assert len(watched.primary.ask("KEYS", CHUNK_NAMES)) == 30
        watched.primary.stop()
        only_misses(tier.read(list(stored)), stored.values())
        heals(tier, stored)
        assert len(watched.replica.ask("KEYS", CHUNK_NAMES)) == 30


def test_a_primary_that_became_a_replica_is_left(watched: Watched) -> None:
    """A planned failover kills no server: the former primary refuses writes, and the tier asks who the new one is."""
    stored = frames(30)
    with opened(watched.sentinel.url, mode="sentinel", service=SERVICE) as tier:
        tier.put(stored)
        until(lambda: watched.sentinel.ask("SENTINEL", "FAILOVER", SERVICE), "failover")  # it refuses for a while
        until(lambda: b"role:slave" in watched.primary.reply("INFO", "replication"), "change of roles")
        heals(tier, frames(30, start=30))
        only_misses(tier.read(list(stored)), stored.values())


def test_an_unknown_service_is_named(watched: Watched) -> None:
    """A misspelled service is the usual mistake, and the message says which one."""
    with pytest.raises(BackendError, match="no service 'kw'"):
        opened(watched.sentinel.url, mode="sentinel", service="kw")


def test_a_replica_as_a_single_server_is_refused_with_the_fix(watched: Watched) -> None:
    """Writes to a replica fail: the message names the mode that finds the primary."""
    with opened(watched.replica.url) as tier:
        (result,) = tier.write(frames(1))
        assert isinstance(result, BackendUnavailableError)
        assert 'mode = "sentinel"' in str(result)
