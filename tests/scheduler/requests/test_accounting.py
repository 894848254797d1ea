"""The account of each request adds up, and is kept for a while after its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from core_bed import Bed, BedSpec
from core_blocks import blocks
from core_parts import Core, disk, make_core, objects
from core_truth import BedRequest, engine_spec
from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.load.load_plan import LoadPlan, tokens_of_chunks
from tierkv.scheduler.requests.accounting import ACCOUNTS_KEPT_MAX, tokens_by_tier
from tierkv.types.account import RequestAccount
from tierkv.types.engine import StepOutput
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierOp


def finish(core: Core, ops: Iterable[TierOp], kind: OutcomeKind) -> None:
    """Complete operations that were handed out in an earlier step."""
    for op in ops:
        core.finish(op, kind)


def account(core: Core, request: BedRequest) -> RequestAccount:
    """Account of a request that has one."""
    found = core.scheduler.request_account(request.request_id)
    assert found is not None
    return found


def load(core: Core, request: BedRequest, tokens: int, computed: int = 0) -> None:
    """Allocate for an offer; its load ends well."""
    table = blocks(range(1, 1 + cdiv(computed + tokens, 4)), filled=computed // 4)
    core.scheduler.update_state_after_alloc(request, [table], tokens)
    (job,) = core.scheduler.build_connector_meta(StepOutput()).loads
    core.report(job.job_id)


def test_tokens_count_for_the_tier_that_was_read() -> None:
    """A chunk that was promoted for this request counts for its source tier, not for the host tier.

    A chunk that was in the host tier before counts as host.
    """
    core = make_core(tiers=[disk(), objects(write="read_only")])
    request = core.arrive(16)
    keys = core.truth.keys(request)
    core.put(keys[:1])
    core.finish_all()
    core.keep_below(keys[1:3])
    assert core.ask(request) is None
    core.finish_all()  # the probe of objects says yes to the last chunk
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 16
    load(core, request, 16)
    final = account(core, request)
    assert final.loaded_tokens == {"host": 4, "disk": 8, "objects": 4}
    assert final.loaded_bytes == {"host": 16, "disk": 32, "objects": 16}
    assert core.counters.tokens_loaded == final.loaded_tokens


def test_another_request_finds_the_promoted_chunks_in_the_host() -> None:
    """The second request is served by the host tier, as promotion intends."""
    core = make_core(tiers=[disk()])
    first, second = core.arrive(16, "first"), core.arrive(16, "second")
    core.keep_below(core.truth.keys(first))
    assert core.ask(first) is None
    core.finish_all()
    assert core.ask(first) == 16
    load(core, first, 16)
    core.ask(second)
    load(core, second, 16)
    assert account(core, first).loaded_tokens == {"disk": 16}
    assert account(core, second).loaded_tokens == {"host": 16}


def test_local_tokens_stored_tokens_and_waiting() -> None:
    """Local tokens, stored tokens (failed chunks do not count), and the time that the lookup waited."""
    core = make_core(tiers=[objects()])
    request = core.arrive(32)
    assert core.ask(request, computed=8) is None
    probes = core.manager.take_ops()
    core.begin(0.5)
    assert core.ask(request, computed=8) is None
    finish(core, probes, OutcomeKind.ABSENT)
    core.finish_all(OutcomeKind.ABSENT)
    core.begin(0.75)  # the engine was busy: this quarter of a second is queue time
    assert core.ask(request, computed=8) == 0
    meta = core.schedule(request, computed=8, scheduled=24, ids=[list(range(1, 9))])
    (job,) = meta.stores
    assert account(core, request).stored_tokens == 0, "not before the store has ended"
    core.report(job.job_id, failed={job.job_id: frozenset(job.keys[:1])})
    final = account(core, request)
    assert (final.local_tokens, final.stored_tokens) == (8, 28)
    assert (final.deferrals, final.deferred_s) == (2, 0.75)
    assert final.deferred_tier_s == 0.5
    assert (core.counters.tokens_local, core.counters.tokens_stored) == (8, 28)
    assert (core.counters.deferred_tier_ms, core.counters.deferred_queue_ms) == (500, 250)


def test_an_answer_to_another_request_is_not_waited_for() -> None:
    """A request that the engine leaves out has its answer early. Later answers to others are not its time."""
    core = make_core(tiers=[objects()])
    first, second = core.arrive(16, "first"), core.arrive(range(100, 116), "second")
    assert core.ask(first) is None
    probes = core.manager.take_ops()
    core.begin(0.25)
    finish(core, probes, OutcomeKind.ABSENT)
    assert core.ask(second) is None
    probes = core.manager.take_ops()
    core.begin(1.0)
    finish(core, probes, OutcomeKind.ABSENT)
    assert (core.ask(first), core.ask(second)) == (0, 0)
    assert [(account(core, one).deferred_tier_s, account(core, one).deferred_s) for one in (first, second)] == [
        (0.25, 1.0), (0.75, 0.75),
    ]  # fmt: skip


def test_a_read_for_another_request_is_not_waited_for() -> None:
    """It renews the answer that the request got long before: that time is not the tier's, but the engine's."""
    core = make_core(tiers=[objects()])
    first, second = core.arrive(16, "first"), core.arrive(16, "second")
    assert core.ask(first) is None
    probes = core.manager.take_ops()
    core.begin(0.25)
    finish(core, probes, OutcomeKind.OK)
    assert core.ask(second) is None, "it is read"
    core.begin(1.0)
    core.finish_all()
    assert core.ask(first)
    assert (account(core, first).deferred_tier_s, account(core, first).deferred_s) == (0.25, 1.0)


def test_a_deferral_ends_when_the_engine_continues() -> None:
    """The engine continued without an answer: the time waited is kept, and no longer grows."""
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    assert core.ask(request) is None
    core.begin(1.0)
    core.schedule(request, computed=0, scheduled=16, ids=[[1, 2, 3, 4]])
    core.begin(3.0)
    core.scheduler.request_finished(request, [[]])
    assert account(core, request).deferred_s == 1.0


def test_the_account_outlives_the_request_within_a_bound() -> None:
    """Engines ask after the end of a request; memory is bounded for any number of requests."""
    core = make_core()
    for i in range(ACCOUNTS_KEPT_MAX + 2):
        request = core.arrive(0, f"r{i}")
        core.scheduler.request_finished(request, [[]])
    assert core.scheduler.request_account("r1") is None
    assert core.scheduler.request_account("r2") == RequestAccount("r2")
    assert len(core.scheduler._accounting._closed) == ACCOUNTS_KEPT_MAX
    assert core.scheduler.request_account("never") is None


def test_an_id_that_is_used_again_starts_a_new_account() -> None:
    """The account of the previous request must not leak into the new one."""
    core = make_core()
    request = core.arrive(16)
    core.ask(request, computed=8)
    core.scheduler.request_finished(request, [[]])
    assert account(core, request).local_tokens == 8
    core.arrive(16)
    assert account(core, request).local_tokens == 0


sizes = st.sampled_from([(4,), (4, 8), (8, 4), (2, 3), (6, 4, 2)])


@given(sizes=sizes, factor=st.integers(1, 3), start=st.integers(0, 40), tokens=st.integers(1, 60), data=st.data())
def test_tokens_by_tier_add_up(
    sizes: tuple[int, ...], factor: int, start: int, tokens: int, data: st.DataObject
) -> None:
    """For any chunk sizes, a start inside a chunk, groups present in part or wholly, or a window: each token counts
    once.
    """
    geometry = Geometry.of(engine_spec(sizes, 1), blocks=factor)
    end = start + tokens
    groups, counts, indices = [], [], []
    for group in geometry.groups:
        stop = cdiv(end, group.block_tokens)
        first = data.draw(st.integers(start // group.block_tokens, stop))
        counts.append(stop - first)
        indices.append(first if stop > first else 0)
        if stop > first:
            groups += [group.index] * (cdiv(end, group.chunk_tokens) - first // factor)
    names = data.draw(st.lists(st.sampled_from(["host", "a", "b"]), min_size=len(groups), max_size=len(groups)))
    plan = LoadPlan(tuple(Key(b"") for _ in groups), tuple(groups), (), tuple(counts), tuple(indices))
    counted = tokens_by_tier(tokens_of_chunks(plan, geometry, start, end), names)
    assert sum(counted.values()) == (tokens if groups else 0)
    assert min(counted.values(), default=0) >= 0


def test_full_attention_counts() -> None:
    """Few window chunks from the host tier must not hide that the prefix was read from a disk."""
    geometry = Geometry.of(engine_spec((4, 4), 4))
    window = replace(geometry.groups[0], window_chunks=1)
    geometry = replace(geometry, groups=(window, geometry.groups[1]))
    plan = LoadPlan((Key(b""),) * 5, (0, 1, 1, 1, 1), (), (1, 4), (3, 0))
    assert tokens_by_tier(tokens_of_chunks(plan, geometry, 0, 16), ["host", *["disk"] * 4]) == {"disk": 16}


@pytest.mark.parametrize("block_tokens", [(4,), (8, 4), (4, 12)])
def test_accounts_of_a_run_add_up_to_what_the_engine_took(block_tokens: tuple[int, ...]) -> None:
    """End to end with partly accepted offers (the check at the end of every bed compares the sums)."""
    bed = Bed(BedSpec(block_tokens=block_tokens, slots=32, reserved=24, gpu_blocks=48, tiers=(disk(),)))
    for tail in range(3):
        request = bed.add([*range(48), 1000 + tail])
        bed.fill_below(request)
    bed.settle()
    bed.check_end()
    assert bed.engine.tokens_external
