"""Chunks that wait to be written to a lower tier, and the victims that are evicted while they wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import Core, disk, make_core
from edge_moves import late, load, put, run
from paced_tier import PacedRun

from tierkv.errors import InvariantError
from tierkv.manager.contract import RequestContext
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.moves.dirty_pins import PINNED_MAX
from tierkv.plugins.loading import load_plugins
from tierkv.policies.lru import LruPolicy
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.structures.rings import PASSED_OVER_MAX
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierHealth, TierOp, Verb

WHO = RequestContext("a")
SLOTS = 16
POLICIES = sorted(load_plugins([], entry_points=lambda **_: ()).policies)


def put_each(core: Core, keys: Sequence[Key]) -> None:
    """Store chunks one by one, so that the first is the oldest."""
    for key in keys:
        put(core, [key])


def begun(core: Core, verb: Verb = Verb.WRITE) -> TierOp:
    """This step's single instruction."""
    (op,) = core.manager.take_ops()
    assert op.verb is verb
    return op


def dirty_pinned(core: Core) -> int:
    """Number of dirty pins."""
    core.manager.validate()
    return len(core.manager._tier_io.admissions.dirty_pins.slots)


def check_end(core: Core) -> None:
    """Everything ends: no slot is held, no chunk is pinned as dirty."""
    core.finish_all()
    assert dirty_pinned(core) == 0
    assert core.host.room == core.host.num_slots


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_that_a_tier_would_have_taken(policy: str, slots: int) -> None:
    """A tier that is fast enough on average, but not for each burst. A lost chunk is computed again. Of 984 chunks (64
    slots), while the end of a write counted as a use, LRU and the adaptive policy lost 80, ARC and S3-FIFO 240, LFU
    128. Later, but without dirty pins, ARC and S3-FIFO lost 160, LFU 80."""
    paced = PacedRun(policy, slots)
    paced.play(10)
    assert paced.core.counters.chunks_stored > 14 * slots
    assert paced.lost == 0
    assert paced.core.counters.stores_refused == 0


def test_the_end_of_a_write_is_no_use() -> None:
    """Chunks 2 and 3 were written long ago, 0 and 1 just now: the first stored is evicted first all the same."""
    core = make_core(slots=4, tiers=[disk()])
    core.keep_below(run(2, 2))
    put_each(core, run(0, 4))
    core.finish(begun(core))
    assert core.host.evict_for(4).keys == run(0, 4)


def test_a_use_during_a_write_counts() -> None:
    """A request loads what is still being written: it is the newest then, also when the write ends after the load."""
    core = make_core(slots=4, tiers=[disk()])
    put_each(core, run(0, 4))
    write = begun(core)
    load(core, run(0, 1))
    core.finish(write)
    assert core.host.evict_for(4).keys == [*run(1, 3), *run(0, 1)]


def test_a_chunk_passed_over_for_a_write_is_the_next_victim() -> None:
    """While chunk 0 is written, chunk 1 is evicted instead; then chunk 0 is the oldest again, not the newest."""
    core = make_core(slots=4, tiers=[disk()])
    core.keep_below(run(1, 9))
    put_each(core, run(0, 4))
    write = begun(core)
    put_each(core, run(5, 1))
    assert core.ready() == {*run(0, 1), *run(2, 2), *run(5, 1)}
    core.finish(write)
    put_each(core, run(6, 1))
    assert core.ready() == {*run(2, 2), *run(5, 2)}


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_with_a_copy_below_are_evicted_before_waiting_ones(policy: str) -> None:
    """Under every policy, also where new chunks are evicted first: six chunks wait, all others have a copy below,
    older and newer, used and not. Ten chunks are stored, and only chunks with a copy are evicted."""
    opened = load_plugins().require_policy(policy).plugin.open(SLOTS)
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)], host_policy=opened)
    core.keep_below(run(0, 5))
    core.keep_below(run(11, 30))
    put_each(core, run(0, SLOTS))
    for _ in range(2):
        core.manager.touch(run(0, 5))
    put(core, run(20, 4))
    put_each(core, run(24, 6))
    assert core.ready().issuperset(run(5, 6))
    assert dirty_pinned(core) == 6
    check_end(core)
    assert core.counters.cascades == {"disk": 6}
    assert not core.counters.cascades_dropped


def test_a_store_takes_the_oldest_when_only_waiting_ones_are_left() -> None:
    """Promise 2: no store waits for a tier. The chunks that have waited longest are evicted and counted."""
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)])
    put_each(core, run(0, SLOTS))
    write = begun(core)
    put(core, run(20, 7))
    assert dirty_pinned(core) == SLOTS // 2
    assert core.ready() == {*run(0, 9), *run(20, 7)}, "the second half of the waiting chunks is not pinned"
    put(core, run(30, 10))
    assert core.ready().issuperset([*run(0, 1), *run(30, 10)]), "what is being written stays, and the store is granted"
    assert not core.ready().intersection(run(1, 3)), "the oldest pinned chunks were evicted"
    core.finish(write)
    check_end(core)
    assert core.counters.cascades["disk"] + core.counters.cascades_dropped["disk"] == SLOTS + 17
    assert core.counters.stores_refused == 0


def test_a_load_takes_them_too() -> None:
    """A promotion gets slots of dirty pins as a store does: a request must not wait for writes."""
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)])
    core.keep_below(run(20, SLOTS - 1))
    put_each(core, run(0, SLOTS))
    begun(core)
    put(core, run(50, 2))
    assert dirty_pinned(core)
    reservation = core.manager.passages.reserve(WHO.request_id, tuple(run(20, SLOTS - 1)), WHO.hints)
    for op in core.manager.take_ops():
        core.finish(op)
    assert reservation.ready


def test_used_chunks_keep_a_quarter() -> None:
    """A tier hangs, half of the host tier is being written to it, and more waits: a quarter of the slots still has what
    is used, not what cannot be written."""
    core = make_core(slots=SLOTS, tiers=[disk(queue=SLOTS // 2)])
    core.keep_below(run(100, 4))
    put_each(core, run(0, SLOTS // 2))
    core.manager.take_ops()
    put_each(core, run(100, 4))
    for first in range(200, 240):
        put_each(core, run(first, 1))
        core.manager.touch(run(100, 4))
        core.manager.take_ops()
        assert dirty_pinned(core) <= SLOTS // 4
    assert core.ready().issuperset(run(100, 3))
    assert core.counters.stores_refused == 0


def test_a_choice_can_pass_over_all_pins() -> None:
    """In a large host tier one choice must be able to pass over all pins. Otherwise stores would be refused."""
    slots = 4 * PINNED_MAX
    core = make_core(slots=slots, tiers=[disk(queue=1)])
    assert PINNED_MAX < PASSED_OVER_MAX
    core.keep_below(run(slots - 100, 200))
    for first in range(0, slots, 128):
        core.begin()  # a step queues a bounded number of chunks
        put(core, run(first, 128))
    for _ in range(3):
        core.begin()
        put(core, run(core.counters.chunks_stored, 100))
    assert dirty_pinned(core) == PINNED_MAX
    assert core.counters.stores_refused == 0


def test_an_evicted_chunk_takes_no_place() -> None:
    """The queue also has chunks that were evicted before there was room for them: those behind them come in instead."""
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)])
    put_each(core, run(0, SLOTS))
    write = begun(core)
    put(core, run(20, 7))
    assert core.ready() == {*run(0, 9), *run(20, 7)}
    core.finish(write)
    write = begun(core)
    assert dirty_pinned(core) == SLOTS // 2 - 1
    put(core, run(50, 1))
    assert dirty_pinned(core) == SLOTS // 2
    core.finish(write)
    check_end(core)


def test_it_waits_for_the_last_of_two_tiers() -> None:
    """Written to the disk, not yet to the bucket: the chunk stays until both have it, and is held once."""
    core = make_core(slots=SLOTS, tiers=[disk(name="fast", queue=1), disk(name="slow", queue=1)])
    for tier in range(2):
        core.keep_below(run(2, 90), tier)
    put_each(core, run(0, SLOTS))
    fast, slow = core.manager.take_ops()
    put_each(core, run(20, 1))
    assert dirty_pinned(core) == 1
    core.finish(fast)
    core.finish(begun(core))
    put_each(core, run(30, 20))
    assert core.ready().issuperset(run(1, 1)), "the slow one has not taken it yet"
    core.finish(slow)
    core.finish(begun(core))
    assert dirty_pinned(core) == 0
    put_each(core, run(60, 2))
    assert not core.ready().intersection(run(0, 2))
    assert not core.counters.cascades_dropped


def test_tenants_with_quotas_have_no_dirty_pins() -> None:
    """A tenant that floods the cache evicts its own chunks, also waiting ones. Others must not lose theirs for them."""
    quotas = Quotas(capacity_bytes=SLOTS)
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)], host_policy=TenantPolicy(LruPolicy, quotas, 1))
    put(core, run(0, SLOTS))
    put(core, run(20, 4))
    assert dirty_pinned(core) == 0


def waiting_core() -> tuple[Core, TierOp]:
    """Seven chunks are pinned behind one that is being written."""
    core = make_core(slots=SLOTS, tiers=[disk(queue=1)])
    core.keep_below(run(8, 20))
    put_each(core, run(0, SLOTS))
    write = begun(core)
    put(core, run(20, 4))
    assert dirty_pinned(core) == 7
    return core, write


def test_a_tier_that_is_out_of_service() -> None:
    """Chunks that wait for a tier that fails are dropped, counted and unpinned; new ones are not pinned."""
    core, write = waiting_core()
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.take_ops()
    assert dirty_pinned(core) == 0
    put_each(core, run(50, 12))
    assert dirty_pinned(core) == 0
    core.finish(write, OutcomeKind.FAILED)
    check_end(core)
    assert core.counters.cascades_dropped["disk"] == 7 + 12


def test_a_tier_that_is_back_before_its_queue_was_dropped() -> None:
    """Chunks that still wait for it are pinned again by the next store."""
    core, write = waiting_core()
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.on_completion(TierHealth(0, usable=True))
    assert dirty_pinned(core) == 0
    core.keep_below(run(60, 1))
    put(core, run(60, 1))
    assert dirty_pinned(core) >= 6
    core.finish(write)
    check_end(core)


def test_a_tier_that_is_detached() -> None:
    """A detached tier may hang without end: chunks in its queue are unpinned."""
    core, _ = waiting_core()
    core.manager.detach("disk")
    assert dirty_pinned(core) == 0
    assert core.host.room == SLOTS - 1, "only what is being written is held"


@pytest.mark.parametrize("scope", ["host", "all"])
def test_a_reset(scope: str) -> None:
    """Stale chunks are unpinned, because a tier may take long to delete everything."""
    core, _ = waiting_core()
    core.manager.reset_cache(scope)  # type: ignore[arg-type]  # it is one of both
    assert dirty_pinned(core) == 0
    assert core.host.room == SLOTS - 1
    core.manager.begin_step(1.0)
    put(core, run(100, SLOTS - 1))
    assert core.ready() == set(run(100, SLOTS - 1))


def test_a_pinned_chunk_is_found_damaged() -> None:
    """A dropped chunk is invisible at once; its slot is freed with its turn in the queue, or when slots are short."""
    core, _ = waiting_core()
    grant = core.manager.prepare_load(run(3, 1), WHO)
    core.manager.complete_load(grant.slots, damaged=grant.slots)
    core.manager.validate()
    assert not core.ready().intersection(run(3, 1))
    put(core, run(100, SLOTS - 1))
    assert core.counters.stores_refused == 0
    core.manager.validate()


def test_a_write_that_is_late_and_fails() -> None:
    """However and whenever a write ends, a chunk that was passed over because of it is the next victim."""
    core = make_core(slots=4, tiers=[disk()])
    core.keep_below(run(1, 9))
    put_each(core, run(0, 4))
    write = begun(core)
    late(core, write)
    put_each(core, run(5, 1))
    core.finish(write, OutcomeKind.FAILED)
    assert core.host.evict_for(1).keys == run(0, 1)


def test_a_chunk_that_waits_twice_is_held_once() -> None:
    """A lease can be in a queue a second time (its chunk was kept for one use, and is used again)."""
    core = make_core(slots=4, tiers=[disk(queue=1)])
    core.keep_below(run(2, 9))
    put_each(core, run(0, 2))
    write = begun(core)
    queue = core.lower[0].write_queue
    queue.extend(queue.first(1))
    put_each(core, run(2, 4))
    assert dirty_pinned(core) == 1
    core.finish(write)
    check_end(core)


def test_validate_finds_a_pin_that_does_not_wait() -> None:
    """A hold that never ends loses a slot: validate() reports it."""
    core, _ = waiting_core()
    core.lower[0].write_queue.pop_front(3)
    with pytest.raises(InvariantError, match="waits for no write"):
        core.manager.validate()


def test_the_pins_of_one_eviction_are_bounded_by_the_step() -> None:
    """Thousands wait when the host tier is full for the first time: a store pins a part, the ends of steps the rest."""
    core = make_core(slots=1024, tiers=[disk(queue=1)], step_keys=64)
    for first in range(0, 1024, 16):
        core.begin()
        put(core, run(first, 16))
    while core.manager._tier_io.cascades.ready:
        core.begin()
        core.manager._tier_io.cascades.offer_ready(core.now)
    core.begin()
    budget = core.manager.budget
    pins_max = SLOTS_PER_KEY * (budget.common + budget.share_keys)
    assert core.manager.prepare_store([(key, 0) for key in run(5000, 1)], RequestContext("a")) is not None
    pinned = [dirty_pinned(core)]
    assert 0 < pinned[0] <= pins_max < 512
    while dirty_pinned(core) < 512:
        core.begin()
        core.manager.take_ops()
        pinned.append(dirty_pinned(core))
        assert 0 < pinned[-1] - pinned[-2] <= pins_max
    core.manager.validate()


def test_chunks_are_pinned_before_evictions_need_it() -> None:
    """Half of the slots are free yet, and more chunks wait than one eviction may pin: each step pins some."""
    core = make_core(slots=1024, tiers=[disk(queue=1)], step_keys=64)
    for first in range(0, 640, 16):
        core.begin()
        put(core, run(first, 16))
        core.manager.take_ops()
    assert dirty_pinned(core) > 64
    assert core.host.free == 1024 - 640
