"""VLLM's own host tier beside tierkv's, in one process and the same rounds. No rows where vLLM is not installed.

Both get the same batches in the same order: full host tier, so that every new chunk evicts an old one; then a prefix of
8,192 resident chunks is looked up. What a request costs around its chunks (its arrival and end) is in the clock on both
sides, because that is where vLLM applies recency.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest, copies_of, fill, keys_of, make_core, random_hashes
from benchmarks.measure import Cost, Settings, cpu_ratios, medians, take_turns, timed
from benchmarks.rows import Row, Target
from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.types.keys import Key

BATCH = 128
BATCHES_PER_TURN = 40
POLICIES = ("lru", "arc")
"""Policies of vLLM; tierkv's is LRU in each row."""

Batches = Sequence[list[Key]]


def run(settings: Settings) -> Iterator[Row]:
    """Measure store cycles at both sizes against both of its policies, and lookups."""
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("vllm_manager: vLLM is not installed here, so there is no limit to compare with\n")
        return
    for policy in POLICIES:
        for resident in settings.pick((100_000, 1_000_000), (1_000,)):
            yield _store_row(policy, resident, settings)
    yield _lookup_row(settings)


def _peer(chunks: int, policy: str) -> Any:  # noqa: ANN401 - a class of a library that need not be here
    return import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager(chunks, cache_policy=policy)


def _peer_context() -> Callable[[], Any]:
    """Make the context of a new request, as vLLM's scheduler does."""
    make, numbers = import_module("vllm.v1.kv_offload.base").ReqContext, itertools.count()
    return lambda: make(req_id=f"request-{next(numbers)}", kv_transfer_params=None)


def _store_row(policy: str, resident: int, settings: Settings) -> Row:
    first = keys_of(random_hashes(resident, seed=1))
    core, peer, context = make_core(resident), _peer(resident, policy), _peer_context()
    fill(core.host, first)
    for start in range(0, resident, BATCH):
        _peer_cycle(peer, context(), first[start : start + BATCH])
    del first
    batches = settings.pick(BATCHES_PER_TURN, 2)
    seeds = itertools.count(2)

    def new_batches() -> Batches:
        keys = keys_of(random_hashes(BATCH * batches, next(seeds)))
        return [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]

    def ours() -> Cost:
        cost = timed(partial(_our_cycles, core.manager, new_batches()))
        core.manager.take_events()
        return cost

    def theirs() -> Cost:
        return timed(partial(_peer_cycles, peer, context, new_batches()))

    turns = take_turns([ours, theirs], settings.rounds)
    return Row(
        f"store cycle, {resident:,} resident",
        "us/key",
        1e6 * medians(turns[0]).cpu_s / (BATCH * batches),
        f"vLLM's manager, {policy.upper()}",
        1e6 * medians(turns[1]).cpu_s / (BATCH * batches),
        cpu_ratios(*turns),
        Target("ratio", "<=", 1.0),
        {"longest of our batches, ms": 1e3 * max(c.cpu_s for c in turns[0]) / batches},
    )


def _our_cycles(manager: OffloadManager, batches: Batches) -> None:
    for number, batch in enumerate(batches):
        ctx = RequestContext(f"writer-{number}")
        grant = manager.prepare_store([(key, 0) for key in batch], ctx)
        if grant is None or len(grant.keys) != len(batch):
            raise RuntimeError("a batch was refused")
        manager.complete_store(grant.slots)
        manager.touch(batch)


def _peer_cycles(peer: Any, context: Callable[[], Any], batches: Batches) -> None:  # noqa: ANN401 - see _peer
    for batch in batches:
        _peer_cycle(peer, context(), batch)


def _peer_cycle(peer: Any, ctx: Any, batch: list[Key]) -> None:  # noqa: ANN401 - see _peer
    peer.on_new_request(ctx)
    output = peer.prepare_store(batch, ctx)
    if output is None or len(list(output.keys_to_store)) != len(batch):
        raise RuntimeError("vLLM refused a batch")
    peer.complete_store(batch, ctx)
    peer.on_request_finished(ctx)


def _lookup_row(settings: Settings) -> Row:
    chunks = settings.pick(8192, 256)
    prompts = [
        random_hashes(chunks, seed=1),
        random_hashes(chunks, seed=2),
    ]  # in turns: nothing is asked twice in a row
    core, peer, context = make_core(4 * chunks), _peer(4 * chunks, "lru"), _peer_context()
    for hashes in prompts:
        fill(core.host, keys_of(hashes))
        _peer_cycle(peer, context(), keys_of(hashes))
    numbers, our_turns, their_turns = itertools.count(), itertools.cycle(prompts), itertools.cycle(prompts)

    def ours() -> Cost:
        core.manager.begin_step(0.0)  # what ends is let go of in steps
        request = BenchRequest(f"request-{next(numbers)}", copies_of(next(our_turns)))
        core.scheduler.on_new_request(request)
        answers: list[int | None] = []
        cost = timed(lambda: answers.append(core.scheduler.get_num_new_matched_tokens(request, 0)[0]))
        if answers != [chunks * BLOCK_TOKENS]:
            raise RuntimeError(f"{chunks} chunks are resident, and the answer was {answers[0]} tokens")
        core.scheduler.request_finished(request, [[]])
        return cost

    def theirs() -> Cost:
        ctx, keys = context(), keys_of(copies_of(next(their_turns)))
        peer.on_new_request(ctx)
        return timed(lambda: [peer.lookup(key, ctx) for key in keys])

    turns = take_turns([ours, theirs], settings.rounds)
    return Row(
        f"first question, {chunks} chunks resident: keys made, chunks held, answer",
        "ns/key",
        1e9 * medians(turns[0]).cpu_s / chunks,
        "vLLM's manager alone: one lookup call per key, nothing held",
        1e9 * medians(turns[1]).cpu_s / chunks,
        cpu_ratios(*turns),
    )
