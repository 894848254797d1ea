"""Reset of the whole cache between two steps (spec, section 13)."""

from __future__ import annotations

import pytest
from calls import calls_of
from core_bed import Bed, BedSpec
from core_blocks import blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest

from tierkv.errors import EngineProtocolError
from tierkv.types.engine import LoadReport, StepOutput
from tierkv.types.tier_ops import Verb
from tierkv.types.transfers import TransferJob


def loading(core: Core, request_id: str = "l") -> tuple[BedRequest, TransferJob]:
    """Request whose load is in flight."""
    request = core.arrive(range(500, 508), request_id)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    core.scheduler.update_state_after_alloc(request, [blocks([20, 21])], 8)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    return request, load


def test_s90_load_and_store_in_flight() -> None:
    """S90: the next metadata flushes both; their late reports make nothing readable.

    The load's blocks are invalid, because its data is outdated. (The lineage drops the jobs; here they keep their slots
    until they end.)
    """
    core = make_core(slots=8)
    request = core.arrive(8)
    (store,) = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    _, load = loading(core)
    core.scheduler.reset_cache()
    assert core.host.room == 4, "four slots are still touched by copies"
    assert core.scheduler.build_connector_meta(StepOutput()).jobs_to_flush == {store.job_id, load.job_id}
    report = core.report(store.job_id, load.job_id)
    assert report == LoadReport(frozenset({"l"}), frozenset({20, 21}))
    assert not core.ready()
    assert core.host.room == 8
    core.scheduler.validate()


def test_s91_an_active_request_is_offered_from_its_start() -> None:
    """S91: after a reset all chunks that a running request has computed are stored again."""
    core = make_core()
    request = core.arrive(16)
    (store,) = core.schedule(request, computed=0, scheduled=12, ids=[[1, 2, 3, 4]]).stores
    core.report(store.job_id)
    core.scheduler.reset_cache()
    (again,) = core.schedule(request, computed=12, scheduled=4, ids=[[]], whole=False).stores
    assert again.block_ids == (1, 2, 3, 4)


@pytest.mark.parametrize("reported_first", [True, False])
def test_s92_d1_store_right_after_a_reset(reported_first: bool) -> None:
    """S92, D1: a store starts while the report of a stale one is outstanding, and both have their own job.

    In any order of reports the jobs of the request stay right, and it is forgotten when the last one has ended.
    """
    core = make_core()
    request = core.arrive(8)
    (old,) = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    core.scheduler.reset_cache()
    (new,) = core.schedule(request, computed=8, scheduled=0, ids=[[]], whole=False).stores
    assert set(new.slots).isdisjoint(old.slots)
    first, second = (old, new) if reported_first else (new, old)
    core.report(first.job_id)
    core.report(second.job_id)
    assert core.ready() == set(new.keys)
    core.scheduler.request_finished(request, [[1, 2]])
    assert not core.scheduler._records


def test_s93_reset_twice() -> None:
    """S93: the second reset finds nothing new, and flushes the same jobs."""
    core = make_core()
    request = core.arrive(8)
    (store,) = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    core.scheduler.reset_cache()
    core.scheduler.reset_cache()
    assert core.scheduler.build_connector_meta(StepOutput()).jobs_to_flush == {store.job_id}
    core.report(store.job_id)
    core.scheduler.validate()


def test_s94_reset_inside_a_step() -> None:
    """S94: between allocation and metadata a load exists that no worker knows; emptying its slots is refused."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    core.ask(request)
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    with pytest.raises(EngineProtocolError, match="inside a step"):
        core.scheduler.reset_cache()
    assert core.scheduler.build_connector_meta(StepOutput()).loads


def test_a_last_store_pass_is_no_step() -> None:
    """A request that ended has a store for the next step. A reset in between is allowed: the store is withdrawn."""
    core = make_core()
    request = core.arrive(8)
    request.hashes_withheld = 1
    (first,) = core.schedule(request, computed=0, scheduled=8, ids=[[1, 2]]).stores
    core.report(first.job_id)
    request.hashes_withheld = 0
    core.scheduler.request_finished(request, [[1, 2]])
    core.scheduler.reset_cache()
    meta = core.scheduler.build_connector_meta(StepOutput())
    assert not meta.stores
    assert core.host.room == core.host.num_slots
    assert not core.scheduler._records
    assert core.counters.stores_failed == 0, "it was taken back, it did not fail"


def test_reset_in_the_middle_of_a_lookup() -> None:
    """A deferred lookup is reopened; a promotion in flight is discarded, and its slot is freed."""
    core = make_core(tiers=[disk()])
    request = core.arrive(8)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    core.scheduler.reset_cache()
    core.finish(read)
    assert not core.ready()
    assert core.ask(request) is None
    (again,) = core.manager.take_ops()
    assert again.verb is Verb.READ
    core.finish(again)
    assert core.ask(request) == 8


def test_an_offer_does_not_survive_a_reset() -> None:
    """A hit offered before the reset cannot be loaded after it."""
    core = make_core()
    request = core.arrive(8)
    core.put(core.truth.keys(request))
    assert core.ask(request) == 8
    core.scheduler.reset_cache()
    with pytest.raises(EngineProtocolError, match="0 were offered"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 2])], 8)
    assert core.ask(request) == 0


def test_s52_reset_forgets_what_is_being_loaded() -> None:
    """S52: no request waits for a load that a reset has made stale, nor for its completion.

    The end of the old load does not hide a new one of the same chunks.
    """
    core = make_core()
    first, old = loading(core, "l")
    core.scheduler.reset_cache()
    second, new = loading(core, "m")
    third = core.arrive(range(500, 508), "n")
    assert core.ask(third) is None
    core.report(old.job_id)
    assert core.ask(third) is None, "the second load still runs"
    core.report(new.job_id)
    assert core.ask(third) == 8
    assert first is not second


def test_a_reset_costs_the_same_with_many_requests() -> None:
    """Promise 5: each request learns of the reset when it is used next. A thousand that wait cost no call."""
    assert calls_of_a_reset(1000) < calls_of_a_reset(10) + 10


def calls_of_a_reset(requests: int) -> int:
    """Calls of Python functions in a reset, with that many requests that have stored chunks."""
    core = make_core(slots=4)
    for number in range(requests):
        request = core.arrive(range(8 * number, 8 * number + 8), f"r{number}")
        core.schedule(request, computed=0, scheduled=8, ids=[[2 * number + 1, 2 * number + 2]])
    return calls_of(core.scheduler.reset_cache)


def test_requests_go_on_after_a_reset() -> None:
    """Over a whole engine: reset during loads, stores and reads; every request still ends, on right bytes."""
    bed = Bed(BedSpec(tiers=(disk(),), gpu_caching=False))
    for start in (0, 0, 4):
        bed.add(list(range(start, start + 20)), 6)
    for _ in range(12):
        bed.step()
        bed.run_io()
        bed.reset()
        bed.check()
        bed.run_transfers()
    bed.settle()
    bed.check_end()
    assert bed.engine.done == 3
