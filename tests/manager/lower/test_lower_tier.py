"""Knowledge about one lower tier, its expiry, and the room in the tier."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from at_rest import content_of
from core_parts import DISK, FRAME_BYTES, OBJECTS
from hypothesis import given
from hypothesis import strategies as st

from tierkv.abc import Capabilities
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.manager.lower.presence_cache import DOUBTS_MAX
from tierkv.manager.lower.residency import HEADROOM_FRAMES_MAX
from tierkv.policies.lru import LruPolicy
from tierkv.policies.prefix_order import CHAIN_MAX
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.structures.ranks import ranks_of
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
A, B, C, D = (make_key(b"key %d" % i, 0) for i in range(4))


def tier_of(
    capabilities: Capabilities = DISK, *, frames: float | None = None, keys_max: int = 1_000_000, probe_max: int = 1024
) -> LowerTier:
    """A tier with room for ``frames`` frames of the largest size."""
    capacity = None if frames is None else int(frames * FRAME_BYTES)
    limits = LowerTierLimits(capacity, WritePolicy.THROUGH, 100, presence_keys_max=keys_max, probe_keys_max=probe_max)
    return LowerTier(0, "tier", capabilities, limits, LruPolicy())


def filled(frames: float, *sizes: int) -> LowerTier:
    """A tier with frames of these sizes, oldest first."""
    tier = tier_of(frames=frames)
    tier.load_index(content_of([(make_key(b"old %d" % i, 0), size) for i, size in enumerate(sizes)]))
    return tier


def test_an_index_answers_at_once() -> None:
    """A tier with an authoritative index is never probed."""
    tier = tier_of()
    tier.load_index(content_of([(A, 10)]))
    assert [tier.presence(key, 0.0) for key in (A, B)] == [HIT, MISS]
    assert tier.residency.used_bytes == 10


def test_a_shared_tier_is_asked_and_believed_for_a_while() -> None:
    """An answer "present" is kept for 30 s, "absent" for 1 s; then the tier is probed again."""
    tier = tier_of(OBJECTS)
    assert tier.presence(A, 0.0) is RETRY
    tier.probed(A, 0.0, present=True)
    tier.probed(B, 0.0, present=False)
    assert [tier.presence(key, 0.9) for key in (A, B)] == [HIT, MISS]
    assert [tier.presence(key, 1.0) for key in (A, B)] == [HIT, RETRY]
    assert tier.presence(A, 30.0) is RETRY


def test_an_answer_that_is_believed_for_no_time_holds_in_its_own_step() -> None:
    """With `absence_ttl_s = 0` every no would otherwise be forgotten before the request that waits for it is asked
    about, and each lookup would be deferred until its deadline."""
    limits = LowerTierLimits(None, WritePolicy.THROUGH, 100, presence_ttl_s=0.0, absence_ttl_s=0.0)
    tier = LowerTier(0, "tier", OBJECTS, limits, LruPolicy())
    tier.probed(A, 5.0, present=True)
    tier.probed(B, 5.0, present=False)
    assert [tier.presence(key, 5.0) for key in (A, B)] == [HIT, MISS]
    assert [tier.presence(key, 5.001) for key in (A, B)] == [RETRY, RETRY]


def test_a_scan_passes_over_what_is_being_deleted() -> None:
    """A frame whose write did not end well may be found again before its deletion is confirmed: taken onto the account,
    its bytes would count twice, and it would be a hit that is gone a moment later."""
    tier = tier_of()
    tier.mark_uncertain(A, 10)
    tier.load_index(content_of([(A, 10), (B, 10)]))
    assert [tier.presence(key, 0.0) for key in (A, B)] == [MISS, HIT]
    assert (tier.residency.used_bytes, tier.residency.reserved_bytes) == (10, 10)
    tier.validate()
    assert not tier.deleted(A, now=0.0)
    assert tier.residency.reserved_bytes == 0
    tier.validate()


def test_an_unusable_tier_has_nothing() -> None:
    """While its breaker is open its chunks are misses; afterwards they are there again."""
    tier = tier_of()
    tier.load_index(content_of([(A, 10)]))
    tier.health_changed(usable=False)
    assert tier.presence(A, 0.0) is MISS
    tier.health_changed(usable=True)
    assert tier.presence(A, 0.0) is HIT


@pytest.mark.parametrize("capabilities", [DISK, OBJECTS])
def test_a_tier_that_returns_is_not_suspected_of_its_outage(capabilities: Capabilities) -> None:
    """Reads that failed with the tier say nothing of its chunks. What a shared tier has answered since stays."""
    tier = tier_of(capabilities)
    for key in (A, B):
        tier.stored(content_of([(key, 10)]), 0.0)
        tier.mark_absent(key, 1.0)
    tier.probed(B, 2.0, present=False)
    tier.health_changed(usable=False)
    tier.health_changed(usable=True)
    assert tier.presence(A, 2.0) is (HIT if capabilities is DISK else RETRY)
    assert tier.presence(B, 2.0) is MISS


@pytest.mark.parametrize("capabilities", [DISK, OBJECTS])
def test_a_suspect_is_absent_for_a_while(capabilities: Capabilities) -> None:
    """A chunk whose read failed is not read again in every step, and not given up for ever."""
    tier = tier_of(capabilities)
    tier.stored(content_of([(A, 10)]), 0.0)
    tier.mark_absent(A, 0.0)
    assert tier.presence(A, 4.9) is MISS
    assert tier.presence(A, 5.0) is (HIT if capabilities is DISK else RETRY)


@pytest.mark.parametrize("capabilities", [DISK, OBJECTS])
def test_one_failed_read_is_doubted_briefly(capabilities: Capabilities) -> None:
    """A single fault made the chunks of a read misses for five seconds. One that cannot be read is doubted as long as
    before from its second failure on, unless that is much later."""
    tier = tier_of(capabilities)
    tier.stored(content_of([(A, 10)]), 0.0)
    known = HIT if capabilities is DISK else RETRY
    for now, doubted_s in ((1.0, 0.5), (2.0, 5.0), (8.0, 5.0), (80.0, 0.5)):
        tier.presence_cache.expire(now)  # as each step does
        tier.mark_absent(A, now, briefly=True)
        assert tier.presence(A, now + doubted_s - 0.1) is MISS
        assert tier.presence(A, now + doubted_s) is known


def test_doubts_are_bounded() -> None:
    """A tier of which every read fails: the table of doubts does not grow with it."""
    tier = tier_of(DISK)
    for i in range(DOUBTS_MAX + 10):
        tier.mark_absent(make_key(b"chunk %d" % i, 0), 0.0)
    assert len(tier.presence_cache._doubted) == DOUBTS_MAX


@pytest.mark.parametrize("capabilities", [DISK, OBJECTS])
def test_a_deletion_that_fails(capabilities: Capabilities) -> None:
    """The frame was bad, and the tier refuses to delete it (read-only, or broken). Read again at once it would be bad
    again, once per step, so it counts as absent for a while. What an index accounts for stays on account."""
    tier = tier_of(capabilities)
    tier.stored(content_of([(A, 10)]), 0.0)
    tier.residency.schedule_delete(A)
    assert tier.presence(A, 0.0) is MISS
    tier.not_deleted(A, tried=True, now=0.0)
    assert tier.presence(A, 4.9) is MISS
    assert tier.residency.used_bytes == (10 if capabilities is DISK else 0)


def test_remembered_answers_are_bounded() -> None:
    """Oldest first: a shared tier can hold more chunks than we have memory for."""
    tier = tier_of(OBJECTS, keys_max=2)
    for key in (A, B, C):
        tier.probed(key, 0.0, present=True)
    tier.presence_cache.expire(0.0)  # as each step does
    assert [tier.presence(key, 0.0) for key in (A, B, C)] == [RETRY, HIT, HIT]


def test_what_is_being_read_is_no_victim() -> None:
    """A promotion reads the oldest chunk: the next one is deleted instead. Two readers hold it until both are done."""
    tier = filled(2, FRAME_BYTES, FRAME_BYTES)
    old = make_key(b"old 0", 0)
    tier.residency.begin_read([old])
    tier.residency.begin_read([old])
    tier.residency.end_read([old])
    assert old not in tier.residency.evict_for(FRAME_BYTES, 0, 100)
    tier.residency.end_read([old])
    assert tier.residency.evict(1) == [old]


def test_what_is_being_written_is_no_victim() -> None:
    """A chunk that is thought to be bad is written anew while its old frame is still on account. Were it chosen as a
    victim now, the deletion could delete the new frame, or the new frame would not be accounted."""
    tier = filled(2, FRAME_BYTES, FRAME_BYTES)
    old = make_key(b"old 0", 0)
    tier.mark_absent(old, 0.0)
    assert tier.wants(old, 0.0)
    tier.residency.begin_write([old], FRAME_BYTES)
    assert old not in tier.residency.evict_for(FRAME_BYTES, 0, 100)
    assert tier.residency.evict(1) == []
    tier.residency.end_write([old], FRAME_BYTES)
    tier.stored(content_of([(old, FRAME_BYTES)]), 0.0)
    assert tier.residency.evict(1) == [old]


@pytest.mark.parametrize("capabilities", [DISK, OBJECTS])
@pytest.mark.parametrize("hindered", ["usable", "emptying", None])
@pytest.mark.parametrize("suspected", [False, True])
def test_a_batch_is_wanted_as_its_chunks_are(capabilities: Capabilities, hindered: str | None, suspected: bool) -> None:
    """Chunks that become readable are looked at in one pass: it must say of each what is said of one alone, or a chunk
    would be written twice, over its own deletion, or never."""
    tier = tier_of(capabilities)
    stored, writing, deleting, reading, absent, mark_absent = keys = [make_key(b"chunk %d" % i, 0) for i in range(6)]
    tier.load_index(content_of([(key, FRAME_BYTES) for key in (stored, deleting, reading, mark_absent)]))
    tier.residency.begin_write([writing], FRAME_BYTES)
    tier.residency.schedule_delete(deleting)
    tier.residency.begin_read([reading, absent])
    if suspected:
        tier.mark_absent(mark_absent, 0.0)
    if hindered:
        setattr(tier, hindered, hindered == "emptying")
    chunks = list(enumerate(keys))
    assert tier.missing(chunks, 0.0) == [chunk for chunk in chunks if tier.wants(chunk[1], 0.0)]
    assert (4, absent) in tier.missing(chunks, 0.0)


@given(st.integers(1, 40), st.lists(st.integers(1, FRAME_BYTES), max_size=60))
def test_room_can_always_be_made(tenths: int, sizes: list[int]) -> None:
    """With stored frames of any size, a frame that fits the capacity fits after the victims are deleted. For one that
    does not, no chunk is evicted."""
    tier = filled(tenths / 10, *sizes)
    capacity = tier.limits.capacity_bytes
    assert capacity is not None
    victims = tier.residency.evict_for(FRAME_BYTES, 0, 100)
    for key in victims:
        tier.deleted(key, now=0.0)
    assert tier.residency.has_room(FRAME_BYTES) == (capacity >= FRAME_BYTES)
    if capacity < FRAME_BYTES:
        assert not victims
    tier.validate()


def test_chunks_that_others_need_cost_a_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may offer heads before their tails. Room is made over several calls then, each of bounded work."""
    count, each = 20_000, 50
    rows = [*range(count)]
    Random(1).shuffle(rows)
    tier = tier_of(frames=count)
    tier.load_index(content_of([(make_key(b"%8d" % row, 0), FRAME_BYTES) for row in rows]))
    residency, moved = tier.residency, list[int]()
    for first in range(0, count, each):
        some = residency.rows.rows_of([make_key(b"%8d" % row, 0) for row in range(first, first + each)])
        residency.listed.order.mark(some, ranks_of(f"{first}", range(1, each + 1)))
    add = residency.policy.add
    monkeypatch.setattr(residency.policy, "add", lambda rows, keys: (moved.append(len(rows)), add(rows, keys)))
    (rank,) = ranks_of("0", [each + 1])
    victims: list[Key] = []
    for _ in range(200):
        before = sum(moved)
        victims += residency.evict_for(FRAME_BYTES, 512, 512, rank)
        assert sum(moved) - before <= CHAIN_MAX + HEADROOM_FRAMES_MAX
    assert len(victims) == 512
    kept = {*range(count)} - {int(key[:8]) for key in victims}
    assert all(row in kept or row + 1 not in kept or (row + 1) % each == 0 for row in range(count)), "tails only"


@pytest.mark.parametrize(("read_bytes", "free"), [(4 * FRAME_BYTES, 50), (3 * FRAME_BYTES, 8), (None, 8)])
def test_a_spare_share_is_kept_free_for_small_frames(read_bytes: int | None, free: int) -> None:
    """Frames that share a call need long free runs; larger ones would only lose chunks by that."""
    capabilities = replace(DISK, spare_share=1 / 16, preferred_read_bytes=read_bytes)
    limits = LowerTierLimits(800 * FRAME_BYTES, WritePolicy.THROUGH, 8)
    tier = LowerTier(0, "tier", capabilities, limits, LruPolicy())
    tier.load_index(content_of([(make_key(b"old %d" % number, 0), FRAME_BYTES) for number in range(800)]))
    assert len(tier.residency.evict_for(FRAME_BYTES, 0, 1000)) == free


def test_victims_are_counted_until_they_are_gone() -> None:
    """Bytes of a deletion under way are neither free yet nor chosen twice."""
    tier = filled(4, *[FRAME_BYTES] * 4)
    first = tier.residency.evict_for(FRAME_BYTES, 0, 100)
    assert first
    assert not tier.residency.has_room(FRAME_BYTES)
    assert tier.residency.evict_for(FRAME_BYTES, 0, 100) == []
    assert tier.residency.may_get_room(FRAME_BYTES)
    for key in first:
        tier.deleted(key, now=0.0)
    assert tier.residency.has_room(FRAME_BYTES)


def test_a_replaced_frame_is_counted_once() -> None:
    """A second write of a key replaces the first one's bytes on the account."""
    tier = tier_of(frames=2)
    tier.stored(content_of([(A, 100)]), 0.0)
    tier.stored(content_of([(A, 70)]), 0.0)
    assert tier.residency.used_bytes == 70
    assert tier.forget(A, 0.0)
    assert tier.residency.used_bytes == 0
    assert not tier.forget(A, 0.0)


def test_a_replaced_frame_counts_for_its_tenant_as_it_is_now() -> None:
    """A quota that counted the first frame's bytes for ever would trim too much, or too little."""
    tenants = TenantPolicy(LruPolicy, Quotas(1 << 20, None, {}), FRAME_BYTES)
    limits = LowerTierLimits(1 << 20, WritePolicy.THROUGH, 100, presence_keys_max=100, probe_keys_max=100)
    tier = LowerTier(0, "tier", DISK, limits, tenants)
    tier.stored(content_of([(A, 100), (B, 10)]), 0.0)
    tier.stored(content_of([(A, 70), (C, 5), (C, 6)]), 0.0)
    assert sum(tenants.usage().values()) == tier.residency.used_bytes == 70 + 10 + 6
    for key in (A, B, C):
        assert tier.forget(key, 0.0)
    assert not tenants.usage()
    assert tier.residency.used_bytes == 0


def test_a_chunk_that_vanishes_while_it_is_deleted() -> None:
    """A read finds nothing where a deletion is under way: its bytes leave the account once, not twice."""
    tier = filled(1, FRAME_BYTES)
    (victim,) = tier.residency.evict_for(FRAME_BYTES, 0, 100)
    assert tier.forget(victim, 0.0)
    tier.validate()
    assert not tier.deleted(victim, now=0.0)
    tier.validate()
    assert (tier.residency.used_bytes, len(tier.residency), tier.is_quiet) == (0, 0, True)


def test_a_deletion_that_was_not_tried_is_repeated_at_once() -> None:
    """The queue of dispatch was full: with a wait after each refusal, a reset of a large tier would take minutes."""
    tier = filled(4, FRAME_BYTES, FRAME_BYTES)
    victims = tier.residency.evict(2)
    assert tier.residency.take_deletions(0.0, 10) == victims
    tier.not_deleted(victims[0], tried=False, now=0.0)
    tier.not_deleted(victims[1], tried=True, now=0.0)
    assert tier.residency.take_deletions(0.0, 10) == [victims[0]]


def test_ranks_of_an_index_follow_their_chunks() -> None:
    """A request that goes on with a prompt of an earlier process writes what it continues: the last chunk that is
    stored and has a known rank. Keys that are not ours have ranks, too."""
    tier = tier_of()
    keys = [make_key(b"old %d" % i, 0) for i in range(4)]
    tier.load_index(content_of([(Key(b"x"), 10), *((key, 10) for key in keys)], [9, 1, 2, 3, 0]))
    residency = tier.residency
    assert [residency.rows.last_written(residency.rows.keys.known(keys[:count])) for count in range(5)] == [
        0,
        1,
        2,
        3,
        3,
    ]
    residency.schedule_delete(keys[2])
    assert residency.rows.last_written(residency.rows.keys.known(keys)) == 2
    tier.stored(content_of([(keys[1], 10)]), 0.0)
    assert residency.rows.last_written(residency.rows.keys.known(keys)) == 1, "written again, with an unknown rank"
    assert residency.rows.last_written(residency.rows.keys.known([B])) == 0


def test_an_index_keeps_the_ranks_at_rest() -> None:
    """A request that continues these chunks after a restart writes its own behind them: see written_order."""
    tier = tier_of()
    tier.load_index(content_of([(A, 10), (B, 20)], [8, 9]))
    rows = tier.residency.rows
    found = rows.keys.known([A, B])
    assert [rows.written.at(row) for row in found] == [8, 9]
    assert rows.last_written(found) == 9
