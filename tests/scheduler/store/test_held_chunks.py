"""Chunks that decoding requests complete in a rest: held, then offered together, or before their blocks are reused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import get_args

import pytest
from core_blocks import blocks
from core_parts import Core, make_core
from core_truth import BedRequest
from group_parts import full, window
from store_parts import FreeQueue, chunk_indices

from tierkv.scheduler.limits import SchedulerLimits, StorePlanName, StorePolicy
from tierkv.scheduler.store.immediate import HELD_MAX
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.transfers import ConnectorMeta

PLANS: tuple[StorePlanName, ...] = get_args(StorePlanName)
TOKENS = 4
"""Of a block, a chunk and a prompt."""


class Decoders:
    """Requests of one chunk, which decode one token in each step. Blocks are numbered from 1, and never reused."""

    def __init__(self, core: Core, number: int = 1) -> None:
        self.core, self._ids = core, count(1)
        self.requests = [core.arrive([100 * i + token for token in range(TOKENS)], f"r{i}") for i in range(number)]
        self.blocks: dict[str, list[int]] = {request.request_id: [] for request in self.requests}
        entries = [self._entry(request, 0, TOKENS, whole=True) for request in self.requests]
        core.report(*[job.job_id for job in core.scheduler.build_connector_meta(StepOutput(tuple(entries))).stores])

    def _entry(self, request: BedRequest, computed: int, scheduled: int, *, whole: bool) -> ScheduledRequest:
        new = () if computed % TOKENS else (next(self._ids),)
        self.blocks[request.request_id] += new
        groups = len(self.core.geometry.groups)
        return ScheduledRequest(request.request_id, computed, scheduled, (new,) * groups, whole)

    def step(
        self, *, rests: bool = True, preempted: Collection[str] = (), others: Sequence[ScheduledRequest] = ()
    ) -> ConnectorMeta:
        """Decode a token of each request. Those that the scheduler only counts are left out, as vLLM's seam does it."""
        scheduler, entries = self.core.scheduler, list(others)
        for request in self.requests:
            if request.request_id in preempted:
                continue
            request.extend([900 + request.num_tokens])
            computed = request.num_tokens - 1
            if computed % TOKENS == 0 or not scheduler.advance(request.request_id, computed, 1):
                entries.append(self._entry(request, computed, 1, whole=False))
        return scheduler.build_connector_meta(StepOutput(tuple(entries), frozenset(preempted)), rests=rests)

    def complete(self, *, rests: bool = True) -> list[ConnectorMeta]:
        """Decode until each request has completed its next chunk."""
        return [self.step(rests=rests) for _ in range(TOKENS)]


def stores_of(metas: Sequence[ConnectorMeta]) -> int:
    """Number of stores of some steps."""
    return sum(len(meta.stores) for meta in metas)


def test_s65_chunks_of_a_rest_are_offered_together_at_its_end() -> None:
    """A store costs most where its code runs cold: so those of a rest run in one step, each from its own block."""
    decoders = Decoders(make_core(), 2)
    core, (first, second) = decoders.core, decoders.requests
    assert stores_of(decoders.complete()) == 0
    assert core.scheduler.has_pending_work
    meta = decoders.step(rests=False)
    assert chunk_indices(core, first, meta) == chunk_indices(core, second, meta) == [1]
    assert [job.block_ids for job in meta.stores] == [(decoders.blocks[name][1],) for name in ("r0", "r1")]
    core.report(*[job.job_id for job in meta.stores])
    assert not core.scheduler.has_pending_work
    assert stores_of(decoders.complete(rests=False)) == 2


def test_s64_without_a_rest_a_chunk_is_offered_in_the_step_that_completes_it() -> None:
    """Chunks must not be held without rests: an operator can switch these off."""
    decoders = Decoders(make_core())
    metas = decoders.complete(rests=False)
    assert [len(meta.stores) for meta in metas] == [0, 0, 0, 1]


def test_few_requests_are_held() -> None:
    """A step must not pay for the chunks of hundreds of requests at once."""
    decoders = Decoders(make_core(), HELD_MAX + 3)
    assert [len(meta.stores) for meta in decoders.complete()] == [0, 0, 0, HELD_MAX + 3]


def test_s77_a_request_that_ends_in_a_rest_stores_what_was_held() -> None:
    """Its blocks are reused afterwards: this is the last opportunity."""
    decoders = Decoders(make_core())
    core, (request,) = decoders.core, decoders.requests
    decoders.complete()
    request.extend([1])  # sampled by the last step
    core.scheduler.request_finished(request, [decoders.blocks["r0"]])
    meta = core.scheduler.build_connector_meta(StepOutput())
    assert chunk_indices(core, request, meta) == [1]
    core.report(*[job.job_id for job in meta.stores])
    assert not core.scheduler.has_pending_work


def test_s79_a_request_that_is_preempted_in_a_rest_stores_what_was_held() -> None:
    """It loses its blocks, and this step will write them: so its store must end before that."""
    decoders = Decoders(make_core())
    core, (request,) = decoders.core, decoders.requests
    decoders.complete()
    request.extend([1])  # sampled by the last step
    meta = decoders.step(preempted=["r0"])
    assert chunk_indices(core, request, meta) == [1]
    assert meta.jobs_to_flush == {job.job_id for job in meta.stores}
    core.report(*meta.jobs_to_flush)
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


def test_no_chunk_is_stored_from_a_block_that_another_request_got() -> None:
    """An engine may name a preemption late. Bytes of another request must never get the key of a held chunk."""
    decoders = Decoders(make_core())
    core = decoders.core
    decoders.complete()
    thief = ScheduledRequest("unknown", 0, TOKENS, ((decoders.blocks["r0"][1],),), replaces_table=True)
    meta = core.scheduler.build_connector_meta(StepOutput((thief,)))
    assert not meta.stores
    assert not core.scheduler.has_pending_work


def test_no_chunk_is_held_of_a_request_that_is_asked_about_again() -> None:
    """A question for a running request says that it has lost its blocks, at a time that the scheduler does not know."""
    decoders = Decoders(make_core())
    core, (request,) = decoders.core, decoders.requests
    decoders.complete()
    core.ask(request)
    assert not core.scheduler.build_connector_meta(StepOutput()).stores


def test_i3_chunks_are_not_held_where_a_window_passes_blocks_on() -> None:
    """The engine gives such blocks to other requests without notice while their request decodes."""
    decoders = Decoders(make_core(groups=(full(TOKENS), window(2 * TOKENS, TOKENS))))
    assert [len(meta.stores) for meta in decoders.complete()] == [0, 0, 0, 1]


def test_s71_a_held_chunk_without_room_is_offered_again_in_each_step() -> None:
    """A rest must not make a chunk wait that could find room in the next step."""
    decoders = Decoders(make_core(slots=2), 2)
    core, refused = decoders.core, decoders.core.counters
    for request in decoders.requests:
        held = core.manager.prepare_load(core.truth.keys(request)[:1], core.record(request).ctx)
        assert held.slots
    decoders.complete()
    decoders.step()
    assert not refused.stores_refused
    for steps in (1, 2, 3):
        assert not decoders.step(rests=steps > 1).stores
        assert refused.stores_refused == 2 * steps


def test_s91_what_is_held_at_a_reset_is_offered_with_the_whole_request() -> None:
    """A chunk from before a reset must not be stored by itself: the request's other chunks are gone."""
    decoders = Decoders(make_core())
    core, (request,) = decoders.core, decoders.requests
    decoders.complete()
    core.scheduler.reset_cache()
    assert not core.scheduler.build_connector_meta(StepOutput()).stores
    assert chunk_indices(core, request, decoders.step()) == [0, 1]


def test_s91_a_chunk_completed_in_a_rest_after_a_reset_is_offered_with_the_whole_request() -> None:
    """Otherwise the front of the request would be absent for as long as the rest holds its end."""
    decoders = Decoders(make_core())
    core, (request,) = decoders.core, decoders.requests
    for _ in range(TOKENS - 1):
        decoders.step()
    core.scheduler.reset_cache()
    assert chunk_indices(core, request, decoders.step()) == [0, 1]


def test_i1_a_request_that_loads_again_stores_nothing_that_was_held() -> None:
    """Its load may fill the blocks, and a request has either a load or stores in flight."""
    core = make_core(limits=SchedulerLimits(store_policy=StorePolicy.REQUEST_LEVEL))
    decoders = Decoders(core)
    (request,) = decoders.requests
    decoders.complete()
    request.extend(range(2 * TOKENS))
    core.put(core.truth.keys(request)[2:3])
    assert core.ask(request, 2 * TOKENS) == TOKENS
    core.scheduler.update_state_after_alloc(request, [blocks([5, 6, 7], filled=2)], TOKENS)
    meta = core.scheduler.build_connector_meta(StepOutput())
    assert len(meta.loads) == 1
    assert not meta.stores


@pytest.mark.parametrize("plan", PLANS)
def test_s66_nothing_is_held_of_a_request_that_stores_no_further_chunk(plan: StorePlanName) -> None:
    """Held requests are work to do: a chunk that may not be stored must be none."""
    core = make_core(limits=SchedulerLimits(store_plan=plan, prompt_only=True))
    core.scheduler.register_free_queue(FreeQueue(), 1000)
    for meta in Decoders(core).complete():
        core.report(*[job.job_id for job in meta.stores])
    assert not core.scheduler.has_pending_work


@pytest.mark.parametrize(("plan", "stores"), [("eager", 1), ("lazy", 0)])
def test_other_plans_hold_nothing(plan: StorePlanName, stores: int) -> None:
    """Eager stores a step later anyway, and lazy must know each block before the engine reuses it."""
    core = make_core(limits=SchedulerLimits(store_plan=plan))
    core.scheduler.register_free_queue(FreeQueue(), 1000)
    decoders = Decoders(core)
    assert stores_of([*decoders.complete(), decoders.step()]) == stores + (plan == "eager")
