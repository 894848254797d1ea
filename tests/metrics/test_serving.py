"""A stack's metrics over HTTP: real requests to a real server."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tierkv
from tierkv import EngineSpec, GroupSpec
from tierkv.errors import ConfigError
from tierkv.metrics import serving
from tierkv.metrics.definitions import GAUGES, HISTOGRAMS, PREFILL_SPEED, READ_LATENCY, READ_SPEED, counters
from tierkv.metrics.serving import MetricsServer

SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)
BY_USE = {READ_LATENCY.name, READ_SPEED.name, PREFILL_SPEED.name, "tierkv_transfer_bytes", "tierkv_transfer_seconds"}
"""Metrics that an unused stack does not have."""


def scraped(server: MetricsServer) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples of a scrape: name to label values to value."""
    with urlopen(server.url) as answer:
        text = answer.read().decode()
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return samples


def config_of(place: Path) -> dict[str, object]:
    """A host tier and a disk."""
    tier = {"backend": "disk", "path": str(place), "capacity": "4MiB", "min_free_bytes": 0}
    return {"host": {"capacity": "1MiB"}, "tiers": [tier]}


def test_one_call_serves_every_metric(tmp_path: Path) -> None:
    """Each metric of the reference page is there before anything was used, and no other one."""
    with tierkv.open_stack(config_of(tmp_path), SPEC) as stack, tierkv.serve_metrics(stack) as server:
        samples = scraped(server)
    families = {name.removesuffix("_total").removesuffix("_bucket") for name in samples}
    families = {name for name in families if not name.endswith(("_sum", "_count"))}
    expected = {metric.name for metric in (*counters(), *GAUGES, *HISTOGRAMS)} - BY_USE
    assert families == expected
    assert samples["tierkv_tier_capacity_bytes"][("disk",)] == 4 << 20
    assert samples["tierkv_tier_capacity_bytes"][("host",)] <= 1 << 20
    assert samples["tierkv_tier_breaker_state"] == {("disk",): 0.0}
    assert samples["tierkv_tokens_loaded_total"] == {("host",): 0.0, ("disk",): 0.0}
    assert samples["tierkv_cascades_dropped_total"] == {("disk",): 0.0}, "an alert misses what a series begins with"
    assert not any(any(samples[name].values()) for name in samples if name.endswith("_total")), "a new stack has a past"


def test_it_listens_on_this_machine_only_unless_told(tmp_path: Path) -> None:
    """Metrics have no access control: the default must not open them to a network."""
    with tierkv.open_stack(config_of(tmp_path), SPEC) as stack, tierkv.serve_metrics(stack) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server._server.server_address[0] == "127.0.0.1"


def test_a_client_that_says_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Scrapers that vanish in a night left a thread and a descriptor each, until the engine had none."""
    monkeypatch.setattr(serving._ImpatientHandler, "timeout", 0.05)
    with tierkv.open_stack(config_of(tmp_path), SPEC) as stack, tierkv.serve_metrics(stack) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as silent:
            silent.settimeout(60.0)
            assert silent.recv(1) == b""
        assert scraped(server)
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    """The most frequent mistake: two engines on one machine with one port."""
    with tierkv.open_stack(config_of(tmp_path), SPEC) as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*in use; use another port"):
            tierkv.serve_metrics(stack, port)
        with pytest.raises(ConfigError, match="port = 70000: give a whole number up to 65535"):
            tierkv.serve_metrics(stack, 70_000)


def test_a_closed_stack_still_answers(tmp_path: Path) -> None:
    """A scrape may come between the close of the stack and that of the server."""
    stack = tierkv.open_stack(config_of(tmp_path), SPEC)
    with tierkv.serve_metrics(stack, labels={"engine": "3"}) as server:
        stack.close()
        assert scraped(server)["tierkv_lookups_total"] == {("3",): 0.0}
    server.close()
    with pytest.raises((OSError, HTTPError)):
        urlopen(server.url)


def test_the_end_of_a_block_closes_the_port(tmp_path: Path) -> None:
    """An engine that opens the next stack on the same port would find it taken."""
    with tierkv.open_stack(config_of(tmp_path), SPEC) as stack:
        with tierkv.serve_metrics(stack) as server:
            scraped(server)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        with tierkv.serve_metrics(stack, server.port) as again:
            scraped(again)
