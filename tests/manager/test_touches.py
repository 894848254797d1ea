"""Uses of prefixes, by requests that have ended or store on: counted in steps, the tail of the prefix first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from calls import CountedKey, calls_of, lookups_of
from core_parts import Core, disk, make_core

from tierkv.manager import touches
from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_index import TierRows
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.policies.prefix_order import NO_CHUNK
from tierkv.types.keys import Key, make_key

CHUNKS = 256
STEP_KEYS = 8


def keys_of(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


def evicted_by(core: Core, count: int) -> list[Key]:
    """Chunks that leave the host tier when ``count`` others come."""
    before = {chunk.key for chunk in core.host.slots.visible()}
    core.put(keys_of(10_000, count))
    return sorted(before - {chunk.key for chunk in core.host.slots.visible()})


def test_a_long_prompt_is_touched_in_steps() -> None:
    """The end of a request of any length costs one step a bounded number of keys; after some steps all are counted."""
    core = make_core(slots=CHUNKS + 8, step_keys=STEP_KEYS)
    prompt, others = keys_of(0, CHUNKS), keys_of(1_000, 8)
    for keys in [prompt[i : i + 8] for i in range(0, CHUNKS, 8)] + [others]:
        core.put(keys)
        core.begin()
    core.manager.touch(prompt)
    policy = core.host.policy
    touched: list[int] = []
    for _ in range(CHUNKS):
        touched.append(core.manager._touches.num_waiting)
        core.begin()
    done = [before - after for before, after in zip([CHUNKS, *touched], touched, strict=False)]
    assert max(done) <= STEP_KEYS * KEYS_PER_LOOK
    assert done[0] > 0
    assert sum(done) == CHUNKS
    assert done.count(0) < CHUNKS - 1, "several steps"
    assert len(policy) == CHUNKS + 8
    assert evicted_by(core, 8) == sorted(others), "what was not touched is evicted first"
    assert evicted_by(core, 8) != sorted(prompt[:8]), "the head stays longest"


def test_uses_beyond_the_bound_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end faster than steps count their uses must not fill the memory."""
    monkeypatch.setattr(touches, "WAITING_MAX", 4 * STEP_KEYS)
    core = make_core(step_keys=STEP_KEYS)
    for number in range(100):
        core.manager.touch(keys_of(1_000 * number, 4 * STEP_KEYS))
    assert core.manager._touches.num_waiting < 8 * STEP_KEYS


def core_with(chunks: int, *, tiers: int = 1, step_keys: int = STEP_KEYS) -> Core:
    """Core whose tiers all have the first ``chunks`` chunks, in the host tier the head as the first to be evicted."""
    core = make_core(slots=chunks + 8, tiers=[disk(name=f"disk {i}") for i in range(tiers)], step_keys=step_keys)
    for start in range(0, chunks, 4):
        core.put(keys_of(start, 4), f"request {start}")
        core.begin()
    for tier in range(tiers):
        core.keep_below(keys_of(0, chunks), tier)
    core.finish_all()
    core.begin()
    return core


def continue_prompt(core: Core, chunks: int) -> None:
    """Note that a request stores chunks behind its prompt of ``chunks`` chunks."""
    core.manager.continue_prefix([Key(CountedKey(key)) for key in keys_of(0, chunks)], 4, RequestContext("r"))


def touch_prompt(core: Core, chunks: int) -> None:
    """End a request that used ``chunks`` chunks."""
    core.manager.touch([Key(CountedKey(key)) for key in keys_of(0, chunks)])


@pytest.mark.parametrize("use", [continue_prompt, touch_prompt])
def test_a_use_costs_the_same_for_every_length_and_number_of_tiers(use: Callable[[Core, int], None]) -> None:
    """A call looks up as many keys for a prompt of 1,024 chunks as for one of 512, and with ten tiers no more."""
    short, long = (lookups_of(use, core_with(chunks, step_keys=16), chunks) for chunks in (512, 1024))
    many = lookups_of(use, core_with(1024, tiers=10, step_keys=16), 1024)
    assert 0 < many <= long == short < 512


@pytest.mark.parametrize("chunks", [32, 128])
def test_a_step_ranks_a_bounded_number_of_chunks_over_all_tiers(chunks: int) -> None:
    """A prefix that fifty tiers have costs a step no more than its budget, however short it is."""
    core = core_with(chunks, tiers=50, step_keys=256)
    prompt = keys_of(0, chunks)
    continue_prompt(core, chunks)
    ranked = [0]
    while ranked[-1] < 50 * chunks and len(ranked) < 100:
        ranked.append(sum(rank > 0 for tier in core.lower for rank in ranks_in(tier, prompt)))
        core.begin()
    assert ranked[-1] == 50 * chunks, "in the end all are ranked"
    steps = [after - before for before, after in pairwise(ranked)]
    assert max(steps) <= touches.RANKED_PER_KEY * 256


@pytest.mark.parametrize("use", [continue_prompt, touch_prompt])
def test_chunks_that_few_of_many_tiers_have_are_counted_in_large_batches(
    use: Callable[[Core, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch passes every tier. With fifty of them one step made a thousand batches of a chunk or two: 20 ms."""
    core = make_core(tiers=[disk(name=f"disk {i}") for i in range(50)], step_keys=256)
    core.keep_below(keys_of(0, CHUNKS), 49)
    core.finish_all()
    core.begin()
    batches: list[int] = []
    rows_of = core.manager.tiers.rows_of

    def counted(keys: Sequence[Key]) -> list[TierRows]:
        batches.append(len(keys))
        return rows_of(keys)

    monkeypatch.setattr(core.manager.tiers, "rows_of", counted)
    use(core, CHUNKS)
    steps = 1
    while core.manager._touches.num_waiting:
        core.begin()
        steps += 1
    assert len(batches) <= CHUNKS // touches.TOGETHER + 2 * steps, batches


def test_a_short_prefix_is_looked_up_once() -> None:
    """Its chunks are found and ranked by one lookup in the host tier and one below, because each store begins so.

    A lookup hashes a key twice: to see whether it is there, and to get what is there.
    """
    assert lookups_of(continue_prompt, core_with(32, step_keys=1024), 32) == 2 * 2 * 32


def test_a_long_prefix_is_continued_in_steps() -> None:
    """Its chunks are ranked and moved in every tier, tail first, in steps: the head is evicted last, everywhere."""
    core = core_with(CHUNKS, tiers=2)
    prompt = keys_of(0, CHUNKS)
    continue_prompt(core, CHUNKS)
    assert any(rank == 0 for rank in ranks_below(core, prompt)), "later steps do the rest"
    steps = 0
    while core.manager._touches.num_waiting:
        core.begin()
        steps += 1
    assert steps > 2
    for tier in core.lower:
        ranks = ranks_in(tier, prompt)
        assert ranks == sorted(ranks)
        assert len(set(ranks)) == CHUNKS
        victims = tier.residency.evict(4)
        assert victims == prompt[:-5:-1], "from the tail"
    core.host.validate()


def ranks_below(core: Core, keys: list[Key]) -> list[int]:
    """Ranks of chunks in the first tier below."""
    return ranks_in(core.lower[0], keys)


def ranks_in(tier: LowerTier, keys: list[Key]) -> list[int]:
    """Rank of each chunk in a tier; 0: unknown."""
    return tier.residency.listed.order.ranks_at(tier.residency.rows.keys.find_all(keys))


def test_the_parts_of_a_continued_prefix_are_one_chain() -> None:
    """Chunks that were ranked in several steps are known as one prefix: all others are evicted before it."""
    core = core_with(CHUNKS)
    continue_prompt(core, CHUNKS)
    while core.manager._touches.num_waiting:
        core.begin()
    order = core.lower[0].residency.listed.order
    [link] = order._deepest.values()
    chain = 0
    while (handle := order._chunk_at(link)) != NO_CHUNK:
        chain, link = chain + 1, order._before[handle]
    assert chain == CHUNKS


def test_what_is_not_there_is_not_continued() -> None:
    """Of a prompt whose front is in a tier only the front is ranked, also where the rest is present behind a gap."""
    core = make_core(slots=64, tiers=[disk()], step_keys=STEP_KEYS)
    core.keep_below(keys_of(0, 20) + keys_of(30, 20))
    continue_prompt(core, 50)
    while core.manager._touches.num_waiting:
        core.begin()
    ranks = ranks_below(core, keys_of(0, 50))
    assert [rank > 0 for rank in ranks] == [True] * 20 + [False] * 30


def test_what_a_lost_head_left_behind_is_continued() -> None:
    """A request computes a lost head again, and stores it before chunks that are still there: they are its own now.

    Otherwise the tail that the request stores behind them would take their place in a tier that is full.
    """
    core, prompt = make_core(slots=64, tiers=[disk(frames=8)]), keys_of(0, 12)
    kept = prompt[2:6]
    core.put(kept, "old")
    core.put(keys_of(1_000, 4), "other")
    core.finish_all()
    core.manager.continue_prefix(prompt, 4, RequestContext("new"))
    ctx, ends = RequestContext("new"), {key: 4 * i for i, key in enumerate(prompt, 1)}
    grant = core.manager.prepare_store(ends.items(), ctx)
    assert grant is not None
    assert set(grant.keys) == set(prompt) - set(kept)
    core.manager.complete_store(grant.slots)
    for _ in prompt:
        core.begin()
        core.finish_all()
    resident = {key for key, _, _ in core.lower[0].residency.rows.listed()}
    assert resident == set(prompt[:8]), "the head fills the tier"
    ranks = ranks_below(core, kept)
    assert ranks == sorted(ranks)
    assert core.host.slots.ranks_of([slot for slot in core.host.slots.find_all(kept) if slot is not None]) == (*ranks,)


def calls_of_a_continuation(chunks: int) -> int:
    """Calls of functions in the continuation of a prefix that the host tier and a lower tier have."""
    core, prompt = make_core(tiers=[disk()]), keys_of(0, chunks)
    core.put(prompt)
    core.finish_all()
    core.begin()
    return calls_of(core.manager.continue_prefix, prompt, 4, RequestContext("a"))


def test_a_continued_prefix_costs_no_call_per_chunk() -> None:
    """Each request that stores behind its prompt continues it: a call per chunk was a tenth of a busy step."""
    assert calls_of_a_continuation(48) - calls_of_a_continuation(16) <= 2
