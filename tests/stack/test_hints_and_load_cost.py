"""Hints, accounts, observations and the choice between loading and computing, over a real disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierkv
from tierkv.abc import PolicyPlugin
from tierkv.hookspecs import hookimpl
from tierkv.manager.lower.read_speed import READINGS_MIN
from tierkv.plugins.loading import load_plugins
from tierkv.policies.lru import LruPolicy
from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.observation import RequestObservation, RequestPhase

SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)
WAIT_S = 20.0


class Asked:
    """A request of whole blocks of 16 tokens, one chunk each."""

    def __init__(self, request_id: str, first: int, count: int, hints: Mapping[str, Any] | None = None) -> None:
        self.request_id = request_id
        self.num_tokens = self.num_prompt_tokens = 16 * count
        self.block_hashes = [bytes([first, i]) * 8 for i in range(count)]
        self.kv_transfer_params = {"tierkv": hints or {}}


class Block:
    """A block that is not computed yet."""

    block_hash = None
    is_null = False

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


def opened(place: Path, *, capabilities: EngineCapabilities | None = None, **config: Any) -> Stack:
    """A stack over host and disk, with pages to copy."""
    whole = {
        "host": {"capacity": "1MiB"},
        "tiers": [{"backend": "disk", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0}],
        **config,
    }
    stack = tierkv.open_stack(whole, replace(SPEC, capabilities=capabilities or EngineCapabilities()))
    stack.worker.register_kv_caches([[np.ones((8, 1024), np.float32)]])
    return stack


def step(stack: Stack, *scheduled: ScheduledRequest) -> frozenset[str]:
    """Run one step; return the requests whose loads ended."""
    meta = stack.build_connector_meta(StepOutput(scheduled))
    stack.worker.start_step(meta)
    stack.worker.queue_stores(meta)
    return stack.update_connector_output(stack.worker.get_finished()).finished


def compute(stack: Stack, request: Asked) -> None:
    """Compute and store a whole request."""
    ids = tuple(range(1, 1 + request.num_tokens // 16))
    stack.on_new_request(request)
    stack.update_state_after_alloc(request, [[Block(i) for i in ids]], 0)
    step(stack, ScheduledRequest(request.request_id, 0, request.num_tokens, (ids,), replaces_table=True))
    stack.request_finished(request, [ids])
    assert stack.flush(WAIT_S)


def ask(stack: Stack, request: Asked) -> int:
    """Return the final answer of a lookup."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        tokens, _ = stack.get_num_new_matched_tokens(request, 0)
        if tokens is not None:
            return tokens
        step(stack)
        time.sleep(0.001)
    raise AssertionError("no answer")


def load(stack: Stack, request: Asked, tokens: int) -> None:
    """Load an offer, and end the request."""
    stack.update_state_after_alloc(request, [[Block(i) for i in range(1, 1 + tokens // 16)]], tokens)
    deadline = time.monotonic() + WAIT_S
    while request.request_id not in step(stack):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stack.request_finished(request, [[]])


def test_hints_choose_the_tier_and_the_account_names_it(tmp_path: Path) -> None:
    """After a restart all chunks are on disk. A request that allows the host tier only loads nothing; one that allows
    the disk loads them. The account names the tier, even after the request has ended.
    """
    with opened(tmp_path) as stack:
        compute(stack, Asked("w", 1, 4))
        account = stack.request_account("w")
        assert account is not None
        assert account.stored_tokens == 64
    with opened(tmp_path) as stack:
        assert ask(stack, Asked("a", 1, 4, {"load_tiers": ["host"]})) == 0
        request = Asked("b", 1, 4, {"load_tiers": ["disk"], "max_load_tokens": 32})
        assert ask(stack, request) == 32
        load(stack, request, 32)
        account = stack.request_account("b")
        assert account is not None
        assert account.loaded_tokens == {"disk": 32}
        assert account.loaded_bytes == {"disk": 2 * 4096}
        again = Asked("c", 1, 4)
        assert ask(stack, again) == 64
        load(stack, again, 64)
        account = stack.request_account("c")
        assert account is not None
        assert account.loaded_tokens == {"host": 32, "disk": 32}
        assert stack.metrics.counters.tokens_loaded == {"host": 32, "disk": 64}


def test_store_hints_reach_the_disk(tmp_path: Path) -> None:
    """After a restart only chunks are found that the hints allowed to store."""
    with opened(tmp_path) as stack:
        compute(stack, Asked("memory", 1, 2, {"store": ["host"]}))
        compute(stack, Asked("once", 2, 2, {"one_shot": True}))
        compute(stack, Asked("never", 3, 2, {"store": False}))
        compute(stack, Asked("always", 4, 2))
        assert ask(stack, Asked("m", 1, 2)) == 32
    with opened(tmp_path) as stack:
        assert [ask(stack, Asked(f"r{i}", i, 2)) for i in (1, 2, 3, 4)] == [0, 0, 0, 32]


@pytest.mark.parametrize(("lookup", "expected"), [({}, 0), ({"recompute": "off"}, 32)], ids=["auto", "off"])
def test_auto_leaves_a_disk_out_that_no_prefill_waits_for(
    tmp_path: Path, lookup: dict[str, Any], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that computes a token in a nanosecond does not load from a disk once its speed is measured; `off` still
    loads. One line of the log says so. The first hits are loaded in either case: no speed is known before some reads.
    """
    first = range(1, 1 + READINGS_MIN)
    with opened(tmp_path) as stack:
        for i in (0, *first):
            compute(stack, Asked(f"w{i}", i, 2))
    fast = EngineCapabilities(prefill_tokens_per_s=1e9)
    with opened(tmp_path, capabilities=fast, lookup=lookup) as stack:
        for i in first:
            request = Asked(f"a{i}", i, 2)
            assert stack.tiers.speeds() == {}
            assert ask(stack, request) == 32
            load(stack, request, 32)
        assert stack.tiers.speeds()["disk"]["bytes_per_s"] > 0
        assert stack.metrics.prefill_tokens_per_s == 1e9
        assert ask(stack, Asked("b", 0, 2)) == expected
        assert stack.metrics.counters.hits_shortened == (not expected)
    lines = [record.tier for record in caplog.records if getattr(record, "event", "") == "tier_slow"]
    assert lines == ([] if expected else ["disk"])


def test_a_floor_in_the_file(tmp_path: Path) -> None:
    """``lookup.load_tokens_min`` reaches the scheduler."""
    with opened(tmp_path, lookup={"load_tokens_min": 33}) as stack:
        compute(stack, Asked("w", 1, 3))
        assert ask(stack, Asked("a", 1, 2)) == 0
        assert ask(stack, Asked("b", 1, 3)) == 48


def test_a_plugins_policy_observes_requests(tmp_path: Path) -> None:
    """A policy from a plugin needs no further registration: having the method is enough."""
    seen: list[RequestObservation] = []

    class Listening(LruPolicy):
        def observe_request(self, observation: RequestObservation) -> None:
            seen.append(observation)

    class Plugin:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_policies(self) -> list[PolicyPlugin]:
            return [PolicyPlugin("listening", "LRU that listens.", lambda _: Listening())]

    registry = load_plugins([Plugin()])
    config = {"host": {"capacity": "1MiB", "policy": "listening"}}
    with tierkv.open_stack(config, SPEC, plugins=registry) as stack:
        request = Asked("a", 1, 2, {"session": "s"})
        stack.on_new_request(request)
        assert stack.get_num_new_matched_tokens(request, 16) == (0, False)
        stack.request_finished(request, [[]])
    assert [observation.phase for observation in seen] == [RequestPhase.ARRIVED, RequestPhase.FINISHED]
    assert (seen[0].gpu_chunks, seen[0].hints.session) == ((1,), "s")


def test_a_plugins_policy_is_guarded_whatever_its_class(tmp_path: Path) -> None:
    """The origin of a policy decides, not the module of its class: a plugin may configure a class of tierkv."""

    class Plugin:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_policies(self) -> list[PolicyPlugin]:
            return [PolicyPlugin("failing", "LRU that fails.", failing)]

    def failing(chunks: int | None) -> LruPolicy:
        policy = LruPolicy(chunks)
        policy.add = lambda *_: 1 // 0  # type: ignore[assignment, method-assign, return-value]
        return policy

    registry = load_plugins([Plugin()])
    config = {"host": {"capacity": "1MiB", "policy": "failing"}}
    with tierkv.open_stack(config, SPEC, plugins=registry) as stack:
        stack.worker.register_kv_caches([[np.ones((8, 1024), np.float32)]])
        compute(stack, Asked("a", 1, 2))
        assert ask(stack, Asked("b", 1, 2)) == 32
    assert registry.policies["lru"].origin.is_builtin
    assert not registry.policies["failing"].origin.is_builtin
