"""Token counters agree with each other, with the requests' accounts, and over HTTP."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack_bed import ANSWER, ENGINE, Faults, opened, prompts_of, stack_config

import tierkv
from tierkv.stack.stack import Stack
from tierkv.testing.faults import raise_error

pytestmark = pytest.mark.needs_torch


def serve_and_ask(stack: Stack, prompts: list[list[int]]) -> list[Any]:
    """Serve prompts; returns the accounts of the requests."""
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch, where a test needs it

    records = Engine(ENGINE, connector=stack).generate(prompts, ANSWER)
    return [stack.request_account(record.request_id) for record in records]


def tokens(stack: Stack) -> dict[str, float]:
    """Token counters by a scrape over HTTP; of those by tier, the sum."""
    with tierkv.serve_metrics(stack) as server, urlopen(server.url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            family.name: sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
            for family in families
            if family.name.startswith("tierkv_tokens_")
        }


def check_sums(counted: dict[str, float]) -> None:
    """Assert that each token that was asked for is local, loaded or computed."""
    parts = [counted[f"tierkv_tokens_{name}"] for name in ("local", "loaded", "computed")]
    assert counted["tierkv_tokens_asked"] == sum(parts), counted


@pytest.mark.parametrize("host_slots", [24, 6])
def test_tokens_asked_are_local_loaded_or_computed(tmp_path: Path, host_slots: int) -> None:
    """The hit rate of a dashboard is that of the requests: with room, and with a host tier smaller than a prompt."""
    prompts = prompts_of(3, 4)
    for number in range(3):
        with opened(stack_config(tmp_path, host_slots=host_slots)) as stack:
            accounts = serve_and_ask(stack, prompts)
            counted = tokens(stack)
            check_sums(counted)
            loaded: Counter[str] = Counter()
            for account in accounts:
                loaded.update(account.loaded_tokens)
            assert counted["tierkv_tokens_loaded"] == loaded.total()
            assert counted["tierkv_tokens_asked"] >= sum(map(len, prompts))
            if number:
                assert loaded.total() > 0
                assert counted["tierkv_tokens_computed"] < counted["tierkv_tokens_asked"]


def test_they_agree_while_a_tier_fails(tmp_path: Path, faults: Faults) -> None:
    """Loads that are given up, because their chunks are lost on the way, become computed tokens."""
    tier = {"backend": "faulty", "name": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB"}
    config = stack_config(tmp_path, host_slots=6, tiers=[{**tier, "min_free_bytes": 0}])
    prompts = prompts_of(4, 3)
    with opened(config, plugins=faults.registry()) as stack:
        serve_and_ask(stack, prompts)
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("read_into", raise_error(lambda: OSError("gone")), times=6)
        serve_and_ask(stack, prompts)
        counted = tokens(stack)
        assert stack.metrics.counters.reads_failed["disk"] > 0
        check_sums(counted)
