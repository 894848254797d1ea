"""Conformance on one server and on a cluster of three primaries."""

from __future__ import annotations

import atexit
import functools
import hashlib
import tempfile
from pathlib import Path

import pytest
from valkey_raw import RawValues
from valkey_servers import ValkeyCluster, ValkeyServer

import tierkv_valkey
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv_valkey import ValkeyOptions


@functools.cache
def folder() -> Path:
    """Folder of this process's servers."""
    kept = tempfile.TemporaryDirectory(prefix="tierkv-valkey-")
    atexit.register(kept.cleanup)
    return Path(kept.name)


@functools.cache
def one_server() -> ValkeyServer:
    """One server for a whole suite; it ends with the process."""
    server = ValkeyServer(folder() / "single")
    atexit.register(server.stop)
    return server


@functools.cache
def one_cluster() -> ValkeyCluster:
    """One cluster for a whole suite; it ends with the process."""
    cluster = ValkeyCluster(folder() / "cluster")
    atexit.register(cluster.stop)
    return cluster


def prefix_of(place: Path) -> str:
    """Prefix of a place: equal places mean the same data."""
    return f"t{hashlib.blake2b(str(place).encode(), digest_size=8).hexdigest()}"


class TestOneServer(BackendConformance):
    """One server."""

    plugin = tierkv_valkey.PLUGIN
    local_place = False
    raw_live = True

    @pytest.fixture(autouse=True)
    def _begin(self) -> None:
        """Start it here: a server ends with the thread that starts it, and tiers are opened on short threads."""
        one_server()

    def make_options(self, place: Path) -> ValkeyOptions:
        return ValkeyOptions(url=one_server().url, prefix=prefix_of(place))

    def raw(self, place: Path, context: BackendContext) -> RawValues:
        return RawValues(one_server().client(), f"{prefix_of(place)}:{context.namespace.fingerprint().hex()}:")

    def server_control(self) -> ValkeyServer:
        return one_server()


class TestCluster(BackendConformance):
    """Cluster of three primaries."""

    plugin = tierkv_valkey.PLUGIN
    local_place = False
    raw_live = True

    @pytest.fixture(autouse=True)
    def _begin(self) -> None:
        """Start them here, as above."""
        one_cluster()

    def make_options(self, place: Path) -> ValkeyOptions:
        return ValkeyOptions(url=one_cluster().url, mode="cluster", prefix=prefix_of(place))

    def raw(self, place: Path, context: BackendContext) -> RawValues:
        return RawValues(one_cluster().client(), f"{prefix_of(place)}:{context.namespace.fingerprint().hex()}:")

    def server_control(self) -> ValkeyCluster:
        return one_cluster()
