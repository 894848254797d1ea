"""Servers of the tests: started on first use, and stopped with the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode does not see siblings

from valkey_servers import ValkeyCluster, ValkeyServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of this test's own."""
    with ValkeyServer(tmp_path / "server") as server:
        yield server


@pytest.fixture(scope="module")
def cluster_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    """Three primaries, without replicas."""
    with ValkeyCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_module: ValkeyCluster) -> ValkeyCluster:
    """The cluster of the module, whole and empty."""
    cluster_of_module.start_dead()
    for node in cluster_of_module.nodes:
        node.ask("FLUSHALL")
    return cluster_of_module
