"""Existence of many chunks at once: the same answers as chunk by chunk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NoReturn

import pytest
from at_rest import content_of
from calls import calls_of
from core_parts import DISK, Core, disk, make_core, objects

from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.policies.lru import LruPolicy
from tierkv.structures.key_table import KeyDirectory, KeyTable
from tierkv.types.cache_events import HOST
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierHealth, Verb

KEYS = [make_key(b"chunk %d" % i, 0) for i in range(200)]
NAMES = [HOST, "fast", "shared", "slow"]


def test_as_chunk_by_chunk() -> None:
    """A prefix counts exactly the chunks that single lookups find, in every state of chunks and tiers, and under every
    hint: an early end would lose a hit, a late one would offer what is not there."""
    rng = random.Random(7)
    ends = set()
    for _ in range(120):
        core = _scattered(rng)
        for _ in range(8):
            hints = RequestHints(load_tiers=None if rng.random() < 1 / 2 else frozenset(rng.sample(NAMES, 3)))
            ctx = RequestContext("asks", hints=hints)
            start = rng.randrange(60)
            stop = rng.randrange(start, len(KEYS))
            before = core.manager.found_below
            count = core.manager.present_prefix(KEYS, start, stop, ctx)
            between = core.manager.found_below
            answers = [core.manager.lookup(key, ctx) for key in KEYS[start : start + count]]
            assert set(answers) <= {LookupResult.HIT, LookupResult.PENDING}
            assert core.manager.found_below - between == between - before
            if start + count < stop:
                end = core.manager.lookup(KEYS[start + count], ctx)
                assert end in (LookupResult.MISS, LookupResult.RETRY)
                ends.add((end, count > 32))
    assert len(ends) == 4, "some kind of end was never met"


def test_prefixes_of_tiers_with_an_index_as_chunk_by_chunk() -> None:
    """Without a shared tier, a prefix is found in one index for all tiers: also where some tiers have a chunk and are
    out of service, delete it, or are not allowed, and where reads of chunks have failed."""
    rng = random.Random(17)
    ends = set()
    for _ in range(200):
        core = make_core(tiers=[disk(name="fast"), disk(name="middle"), disk(name="slow")])
        for tier, lower in enumerate(core.lower):
            core.keep_below(rng.sample(KEYS, rng.choice((100, 190, 199))), tier)
            _damage(lower, rng.sample(KEYS, rng.choice((0, 2))), rng.sample(KEYS, rng.choice((0, 0, 20))))
        if rng.random() < 1 / 4:
            core.manager.on_completion(TierHealth(rng.randrange(3), usable=False))
        allowed = rng.choice((None, frozenset({"fast", "slow"})))
        ctx = RequestContext("asks", hints=RequestHints(load_tiers=allowed))
        first, stop = rng.randrange(60), rng.randrange(60, 200)
        single = [core.manager.lookup(key, ctx) is LookupResult.HIT for key in KEYS[first:stop]]
        count = single.index(False) if False in single else len(single)
        assert core.manager.present_prefix(KEYS, first, stop, ctx) == count
        ends.add(min(count, 33))
    assert len(ends) > 20, "prefixes of all lengths were met"


def test_chunks_beside_one_that_could_not_be_read_cost_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed read, only chunks that some read failed for are looked up one by one: otherwise a long prompt
    would cost several times as much for as long as the doubt lasts."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow")])
    core.keep_below(KEYS, tier=1)
    core.lower[1].mark_absent(KEYS[90], 0.0)
    monkeypatch.setattr(LowerTier, "presence_of", None)
    index = core.manager.tiers._indexes[0]
    assert index.prefix(KEYS, 0.0, None) == 90
    assert index.ranks(KEYS, 0.0, None).count(1) == len(KEYS) - 1


def test_sources_are_the_fastest() -> None:
    """A chunk is read from the first tier in order that is known to have it. A shared tier whose answer has expired
    counts only where the caller trusts it, because the chunk was there when the hit was found."""
    core = make_core(tiers=[disk(name="fast"), objects(name="shared"), disk(name="slow")])
    fast, shared, slow = core.lower
    core.keep_below(KEYS[:2], tier=0)
    core.keep_below(KEYS[1:3], tier=2)
    shared.probed(KEYS[3], 0.0, present=True)
    shared.probed(KEYS[4], 0.0, present=False)
    io = core.manager._tier_io
    assert io.sources_of(KEYS[:6]) == [fast, fast, slow, shared, None, None]
    assert io.sources_of(KEYS[:6], trusting=True) == [fast, fast, slow, shared, None, shared]
    assert io.sources_of(KEYS[:3], {"slow"}) == [None, slow, slow]
    assert io.source_of(KEYS[1]) is fast


def test_sources_as_tier_by_tier() -> None:
    """One index answers for all tiers. It must answer as asking one tier after the other does, also for a tier that was
    attached later and has an index of its own."""
    rng = random.Random(11)
    for _ in range(60):
        core = _scattered(rng)
        if rng.random() < 1 / 2:
            late = LowerTier(3, "late", DISK, core.lower[0].limits, LruPolicy())
            late.load_index(content_of([(key, 8192) for key in rng.sample(KEYS, 120)]))
            core.manager.attach(late, before=rng.choice((None, "fast", "slow")))
        now, tiers = core.now, core.manager.tiers.in_service
        for trusting in (False, True):
            allowed = rng.choice((None, {"fast", "late"}, {"shared", "slow"}))
            found = core.manager._tier_io.sources_of(KEYS, allowed, trusting=trusting)
            for key, source in zip(KEYS, found, strict=True):
                answers = {
                    tier.name: tier.presence(key, now) for tier in tiers if allowed is None or tier.name in allowed
                }
                hits = [name for name, answer in answers.items() if answer is LookupResult.HIT]
                asked = [name for name, answer in answers.items() if trusting and answer is LookupResult.RETRY]
                assert (source and source.name) == next(iter(hits or asked), None)


def test_a_use_counts_in_every_tier_that_has_the_chunk() -> None:
    """A prefix stays in each of its tiers as long as it is used, its head longest."""
    core = make_core(tiers=[disk(name="fast"), disk(name="middle"), disk(name="slow")])
    fast, middle, slow = core.lower
    core.keep_below(KEYS[:6], tier=0)
    core.keep_below(KEYS[3:9], tier=2)
    fast.residency.schedule_delete(KEYS[1])
    core.manager.touch(KEYS[:5])
    assert middle.residency.evict(9) == []
    assert fast.residency.evict(9) == [KEYS[i] for i in (5, 4, 3, 2, 0)]
    assert slow.residency.evict(9) == [KEYS[i] for i in (5, 6, 7, 8, 4, 3)]


def test_expired_doubts_are_forgotten() -> None:
    """After a failed read the chunks of a tier are looked up one by one. This must end when the doubts have expired."""
    core = make_core(tiers=[disk()])
    (tier,) = core.lower
    core.keep_below(KEYS)
    for key in KEYS:
        tier.mark_absent(key, 0.0)
    core.begin(4.9)
    assert len(tier.presence_cache) == len(KEYS)
    for _ in range(4):
        core.begin(5.0)
    assert not tier.presence_cache.any
    tier.mark_absent(KEYS[0], 5.0)
    tier.stored(content_of([(KEYS[0], 8192)]), 5.0)
    assert not tier.presence_cache.any


@pytest.mark.parametrize("tiers", [1, 10, 50])
def test_one_lookup_per_key_however_many_tiers(tiers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existence, sources and uses cost one lookup per key: ten tiers must not cost ten times one tier."""
    core = make_core(tiers=[disk(name=f"tier{i}") for i in range(tiers)])
    core.keep_below(KEYS, tier=tiers - 1)
    looked_up: list[int] = []
    places = KeyDirectory.places

    def counted(directory: KeyDirectory, keys: Sequence[Key]) -> list[int]:
        looked_up.append(len(keys))
        return places(directory, keys)

    monkeypatch.setattr(KeyDirectory, "places", counted)
    monkeypatch.setattr(KeyTable, "find", None)
    manager = core.manager
    assert manager.present_prefix(KEYS, 0, len(KEYS), RequestContext("a")) == len(KEYS)
    assert manager._tier_io.sources_of(KEYS) == [core.lower[-1]] * len(KEYS)
    manager.touch(KEYS)
    assert sum(looked_up) <= 3 * len(KEYS)


def test_a_detached_tier_is_removed_in_slices() -> None:
    """A tier of a million chunks is detached while requests run: no step may remove all of its keys at once. Its number
    is free afterwards, and the chunks of the other tiers are still found."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow")])
    fast, slow = core.lower
    keys = [make_key(b"many %d" % i, 0) for i in range(5000)]
    core.keep_below(keys, tier=0)
    core.keep_below(keys[:100], tier=1)
    directory = fast.residency.rows.keys.directory
    core.manager.detach("fast")
    core.manager.forget(0)
    left = len(fast.residency.rows.keys)
    for _ in range(20):
        core.begin()
        assert left - len(fast.residency.rows.keys) <= core.manager.budget.keys_max
        left = len(fast.residency.rows.keys)
        assert core.manager._tier_io.sources_of(keys[98:102]) == [slow, slow, None, None]
    assert left == 0
    assert sum(map(len, directory.shards)) == 100
    assert directory.tables == [None, None, slow.residency.rows.keys]


def test_the_source_of_one_key_is_found_without_a_walk_over_the_tiers() -> None:
    """Grants ask chunk by chunk, so each question costs the same for one tier and for fifty."""
    core = make_core(tiers=[disk(name=f"tier{i}") for i in range(50)])
    core.keep_below(KEYS, tier=49)

    class Unwalkable(dict[int, tuple[int, LowerTier]]):
        """Tiers by table that can be looked up, and not iterated over."""

        def items(self) -> NoReturn:
            raise AssertionError("every tier was looked at for one key")

    (index,) = core.manager.tiers._indexes
    index._ranked = Unwalkable(index._ranked)
    assert core.manager._tier_io.source_of(KEYS[7]) is core.lower[49]
    assert core.manager.lookup(KEYS[7], RequestContext("a")) is LookupResult.HIT


@pytest.mark.parametrize("tiers", [1, 10, 50])
def test_an_unknown_prompt_ends_at_its_first_block(tiers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of thousands of chunks that no tier has ends within a bounded number of keys, however many tiers."""
    core = make_core(tiers=[disk(name=f"tier{i}") for i in range(tiers)])
    asked: list[int] = []
    find_all = core.host.slots.find_all
    monkeypatch.setattr(core.host.slots, "find_all", lambda keys: asked.append(len(keys)) or find_all(keys))
    keys = [make_key(b"long %d" % i, 0) for i in range(8192)]
    assert core.manager.present_prefix(keys, 0, len(keys), RequestContext("a")) == 0
    assert sum(asked) == 32


def _scattered(rng: random.Random) -> Core:
    """Core whose chunks are in all states: stored, stored but deleted, coming, expired, probed and suspect."""
    core = make_core(slots=128, tiers=[disk(name="fast"), objects(name="shared"), disk(name="slow")])
    fast, shared, slow = core.lower
    manager = core.manager
    deleted, suspect = rng.choice((0, 1, 2)), rng.choice((0, 0, 1))

    def some(count: int) -> list[Key]:
        return rng.sample(KEYS, count)

    for tier, count in rng.sample([(0, 150), (2, 190)], 2):
        core.keep_below(some(count), tier)
    for key in some(100):
        shared.probed(key, 0.0, present=rng.random() < 3 / 4)
    coming = tuple(key for key in some(10) if manager.lookup(key, RequestContext("x")) is LookupResult.HIT)
    manager.passages.reserve("reader", coming)
    ops = manager.take_ops()
    writer = RequestContext("writer", hints=RequestHints(ttl_s=rng.choice((None, 1.0)), store=frozenset()))
    grant = manager.prepare_store([(key, 0) for key in some(40)], writer)
    assert grant is not None
    manager.complete_store(grant.slots[5:])
    for op in ops:
        if op.verb is Verb.READ and rng.random() < 1 / 2:
            core.finish(op)
    for lower in (fast, slow):
        _damage(lower, some(deleted), some(suspect))
    if rng.random() < 1 / 5:
        manager.on_completion(TierHealth(rng.randrange(3), usable=False))
    core.begin(rng.choice((0.0, 0.9, 1.5)))
    return core


def _damage(tier: LowerTier, deleted: Sequence[Key], suspect: Sequence[Key]) -> None:
    """Have some chunks of a tier deleted, and others in doubt after a failed read."""
    for key in deleted:
        if tier.may_delete(key, 0.0):
            tier.residency.schedule_delete(key)
    for key in suspect:
        tier.mark_absent(key, 0.0)


def test_a_prefix_that_ends_costs_no_call_per_chunk() -> None:
    """Most prompts continue a stored prefix, so the usual search ends at a chunk that is missing."""
    counts = []
    for chunks in (16, 64):
        core = make_core(slots=128)
        core.put(KEYS[:chunks])
        counts.append(calls_of(core.manager.present_prefix, KEYS, 0, len(KEYS), RequestContext("asks")))
        assert core.manager.present_prefix(KEYS, 0, len(KEYS), RequestContext("asks")) == chunks
    assert counts[0] == counts[1]
