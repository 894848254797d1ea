"""Hints change which chunks are loaded and stored for their own request, and for no other."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core, objects
from core_truth import BedRequest

from tierkv.scheduler.requests.hint_reader import WARNINGS_MAX
from tierkv.types.engine import StepOutput
from tierkv.types.tier_ops import OutcomeKind, Verb
from tierkv.types.transfers import TransferJob


def store(core: Core, request: BedRequest) -> tuple[TransferJob, ...]:
    """Compute a whole request. Returns its store jobs, which end well."""
    count = request.num_tokens
    core.scheduler.on_new_request(request)
    meta = core.schedule(request, computed=0, scheduled=count, ids=[list(range(1, 1 + count // 4))])
    core.report(*(job.job_id for job in meta.stores))
    core.scheduler.request_finished(request, [[]])
    last = core.scheduler.build_connector_meta(StepOutput())
    core.report(*(job.job_id for job in last.stores))
    return meta.stores + last.stores


def test_hints_are_warned_of_once_and_counted_always() -> None:
    """A client with a typing error in every request must not fill the log; the counter shows each occurrence."""
    core = make_core(tiers=[disk()])
    for i in range(3):
        core.arrive(4, f"r{i}", tierkv={"one_shoot": True, "load_tiers": ["dsk"], "ttl_s": "soon"})
    assert len(core.warnings) == 3
    assert core.counters.hints_ignored == 9
    core.arrive(4, "r9", tierkv={"ttl_s": -1})
    assert len(core.warnings) == 4, "another kind of fault of the same key is logged"


@pytest.mark.parametrize(
    "params",
    [["x"], "x", 7, {"tierkv": {"ttl_s": 10**400}}, {"tierkv": {"priority": 10**5000}}, {"tierkv": {10**5000: 1}}],
    ids=["list", "text", "number", "beyond a float", "beyond a text", "key beyond a text"],
)
def test_parameters_of_any_kind_never_reach_the_engine_as_an_exception(params: object) -> None:
    """A user's parameters can be anything: faults are logged once, counted, and ignored."""
    core = make_core()
    for i in range(2):
        request = core.request(range(16), f"r{i}")
        request.kv_transfer_params = params  # type: ignore[assignment] - what an engine passes on unread
        core.scheduler.on_new_request(request)
        assert core.ask(request) == 16 * i
        store(core, request)
    assert core.counters.hints_ignored == 2
    assert len(core.warnings) == 1
    assert not core.scheduler.has_pending_work
    core.scheduler.validate()


def test_warnings_have_a_bound() -> None:
    """A client that invents a new key each time must not fill log and memory."""
    core = make_core()
    for i in range(WARNINGS_MAX + 50):
        core.arrive(4, f"r{i}", tierkv={f"key{i}": 1})
    assert len(core.warnings) == WARNINGS_MAX


def test_max_load_tokens_caps_a_hit() -> None:
    """C + H stays within C + max_load_tokens, and the hit stays valid: whole chunks where the limit cuts one."""
    core = make_core()
    request = core.arrive(32, tierkv={"max_load_tokens": 12})
    core.put(core.truth.keys(request))
    assert core.ask(request) == 12
    assert core.ask(request, computed=8) == 12
    assert core.ask(core.arrive(32, "free")) == 32


def test_s48_max_load_tokens_0_asks_no_tier() -> None:
    """S48: a request that skips the cache costs no lookup, so no probe of a shared tier either."""
    core = make_core(tiers=[objects()])
    assert core.ask(core.arrive(32, tierkv={"max_load_tokens": 0})) == 0
    assert not core.manager.take_ops()


def test_load_tiers_asks_only_these() -> None:
    """A request that excludes the object store is answered at once: no probe, no promotion from there."""
    core = make_core(tiers=[disk(), objects()])
    request = core.arrive(16, tierkv={"load_tiers": ["host", "disk"]})
    keys = core.truth.keys(request)
    core.put(keys[:1])
    core.finish_all()
    core.keep_below(keys[1:2])
    assert core.ask(request) is None, "the disk's chunk has to be read"
    (op,) = core.manager.take_ops()
    assert (op.tier, op.verb, op.keys) == (0, Verb.READ, (keys[1],))
    core.finish(op)
    assert core.ask(request) == 8


def test_load_tiers_chooses_what_is_read() -> None:
    """The fastest tier with a chunk is read, unless it is excluded: then the next one."""
    core = make_core(tiers=[disk(name="near", write="read_only"), disk(name="far", write="read_only")])
    request = core.arrive(16, tierkv={"load_tiers": ["far"]})
    for tier in (0, 1):
        core.keep_below(core.truth.keys(request), tier)
    assert core.ask(request) is None
    assert {op.tier for op in core.finish_all()} == {1}
    assert core.ask(request) == 16


def test_load_tiers_host_only_is_never_deferred() -> None:
    """Lower tiers do not count, so there is nothing to wait for."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16, tierkv={"load_tiers": ["host"]})
    keys = core.truth.keys(request)
    core.keep_below(keys)
    core.put(keys[:2])
    assert core.ask(request) == 8


def test_load_tiers_without_host_needs_another_tier_to_have_it() -> None:
    """A chunk only in the host tier does not count; one also on the disk is served by the host's copy."""
    core = make_core(tiers=[disk(write="read_only")])
    request = core.arrive(16, tierkv={"load_tiers": ["disk"]})
    keys = core.truth.keys(request)
    core.put(keys)
    assert core.ask(request) == 0
    core.keep_below(keys[:2])
    assert core.ask(request) == 8
    assert not core.manager.take_ops()


def test_load_tiers_empty_loads_nothing() -> None:
    """With the empty list nothing is loaded."""
    core = make_core()
    request = core.arrive(16, tierkv={"load_tiers": []})
    core.put(core.truth.keys(request))
    assert core.ask(request) == 0


def test_a_promotion_from_another_tier_does_not_count() -> None:
    """Another request is reading the chunks from objects: this one must not wait for an excluded tier."""
    core = make_core(tiers=[objects()])
    other = core.arrive(16, "other")
    assert core.ask(other) is None
    core.finish_all()
    request = core.arrive(16, tierkv={"load_tiers": ["host"]})
    core.begin(0.1)
    assert core.ask(other) is None
    core.manager.take_ops()
    assert core.ask(request) == 0


@pytest.mark.parametrize("hint", [{"store": False}, {"store": []}, {"max_offload_tokens": 0}], ids=str)
def test_nothing_is_stored_with_store_false(hint: dict[str, object]) -> None:
    """With ``store: false`` no chunk of the prompt is stored."""
    core = make_core(tiers=[disk()])
    assert not store(core, core.request(16, tierkv=hint))
    assert not core.ready()


def test_store_names_the_tiers_that_get_it() -> None:
    """A chunk is written to the named tiers only; without the hint to all."""
    core = make_core(tiers=[disk(), objects()])
    store(core, core.request(16, tierkv={"store": ["objects"]}))
    assert {op.tier for op in core.finish_all()} == {1}
    store(core, core.request(range(50, 66), "b"))
    assert {op.tier for op in core.finish_all() if op.verb is Verb.WRITE} == {0, 1}


def test_what_is_promoted_for_a_request_keeps_its_route() -> None:
    """With ``store: false`` a promotion writes the chunk to no tier in between."""
    core = make_core(tiers=[disk(), objects()])
    request = core.arrive(16, tierkv={"store": False})
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) is None
    assert {op.verb for op in core.finish_all()} == {Verb.READ}
    other = core.arrive(range(50, 66), "b")
    assert core.ask(other) is None
    core.finish_all()
    assert core.ask(other) is None
    assert {op.verb for op in core.finish_all()} == {Verb.READ, Verb.WRITE}, "without it the disk is filled"


def test_a_route_does_not_outlive_a_failed_store() -> None:
    """The next chunk in the slot of a failed store belongs to another request."""
    core = make_core(slots=1, tiers=[disk()])
    request = core.request(4, tierkv={"store": ["host"]})
    core.scheduler.on_new_request(request)
    (job,) = core.schedule(request, computed=0, scheduled=4, ids=[[1]]).stores
    core.report(job.job_id, failed={job.job_id: frozenset(job.keys)})
    core.scheduler.request_finished(request, [[]])
    store(core, core.request(range(50, 54), "b"))
    assert [op.verb for op in core.finish_all()] == [Verb.WRITE]


# -- one_shot ----------------------------------------------------------------------------------------------------------


def test_one_shot_does_not_cascade_and_goes_first() -> None:
    """G9: one-shot prompts are not written to disk, and a flood of them evicts its own chunks only."""
    core = make_core(slots=8, tiers=[disk()])
    kept = core.request(16, "kept")
    store(core, kept)
    core.finish_all()
    flood = [core.request(range(100 * i, 100 * i + 16), f"r{i}", tierkv={"one_shot": True}) for i in range(1, 6)]
    for request in flood:
        assert store(core, request)
        assert not core.manager.take_ops()
    assert core.ready() == {*core.truth.keys(kept), *core.truth.keys(flood[-1])}
    assert core.counters.evictions["host"] == 16
    core.scheduler.validate()


def test_one_shot_goes_before_older_chunks() -> None:
    """It is evicted first although others have not been used for longer."""
    core = make_core(slots=8)
    old, one_shot = core.request(16, "old"), core.request(range(100, 116), "x", tierkv={"one_shot": True})
    store(core, old)
    store(core, one_shot)
    new = core.request(range(200, 208), "new")
    store(core, new)
    assert set(core.truth.keys(old)) < core.ready()
    assert len(core.ready() & set(core.truth.keys(one_shot))) == 2


def test_one_shot_ends_when_another_request_uses_the_chunk() -> None:
    """The hint was wrong about a shared head: after another use its chunks are like others."""
    core = make_core(slots=8)
    first = core.request(16, "first", tierkv={"one_shot": True})
    store(core, first)
    core.manager.prepare_store([(key, 0) for key in core.truth.keys(first)[:2]], core.record(core.request(8, "b")).ctx)
    store(core, core.request(range(100, 124), "new"))
    assert core.ready() & set(core.truth.keys(first)) == set(core.truth.keys(first)[:2])


# -- ttl_s -------------------------------------------------------------------------------------------------------------


def test_ttl_ends_a_chunk_everywhere() -> None:
    """After its TTL a chunk counts as absent at once, and is deleted from the host tier and from the disk."""
    core = make_core(tiers=[disk()])
    request = core.request(16, tierkv={"ttl_s": 5})
    store(core, request)
    core.finish_all()
    keys = core.truth.keys(request)
    assert core.ask(core.arrive(16, "in time", tierkv={"ttl_s": 1})) == 16
    core.manager.passages.release("in time")
    core.scheduler.request_finished(core.scheduler._records["in time"].request, [[]])
    core.now = 5.0
    core.scheduler.begin_step(5.0)  # the manager has not yet swept at this time
    core.manager.step.now = 5.0
    assert core.ask(core.arrive(16, "late")) == 0
    core.begin(5.0)
    (op, *_) = core.manager.take_ops()
    assert op.verb is Verb.DELETE
    assert set(op.keys) == set(keys)
    core.finish(op)
    core.begin(5.1)
    assert not core.manager.take_ops()
    assert not core.ready()
    assert not len(core.lower[0].residency)
    assert not core.manager.retention.any, "nothing is remembered of deleted chunks"
    core.scheduler.validate()


def test_ttl_is_lifted_by_a_use_without_one() -> None:
    """A use by a request without a TTL removes the TTL."""
    core = make_core()
    request = core.request(16, tierkv={"ttl_s": 5})
    store(core, request)
    store(core, core.request(8, "b"))
    core.begin(6.0)
    assert core.ask(core.arrive(16, "c")) == 8


def test_ttl_is_prolonged_but_never_shortened() -> None:
    """Two requests with different TTLs: the longer one holds."""
    core = make_core()
    store(core, core.request(16, tierkv={"ttl_s": 5}))
    store(core, core.request(16, "b", tierkv={"ttl_s": 9}))
    store(core, core.request(16, "c", tierkv={"ttl_s": 1}))
    core.begin(8.9)
    assert core.ask(core.arrive(16, "d", tierkv={"ttl_s": 1})) == 16
    core.begin(9.0)
    assert core.ask(core.arrive(16, "e")) == 0


def test_ttl_does_not_end_what_a_tier_has_for_good() -> None:
    """A chunk on disk without a TTL gets none when another request stores it in the host tier again."""
    core = make_core(tiers=[disk()])
    request = core.request(16, tierkv={"ttl_s": 5, "load_tiers": []})
    core.keep_below(core.truth.keys(request))
    store(core, request)
    core.begin(6.0)
    assert core.ask(core.arrive(16, "b")) == 16


def test_ttl_chunks_do_not_reach_shared_tiers() -> None:
    """Other processes cannot know when they expire."""
    core = make_core(tiers=[disk(), objects()])
    store(core, core.request(16, tierkv={"ttl_s": 5}))
    assert {op.tier for op in core.finish_all()} == {0}


def test_a_deletion_that_fails_is_tried_again() -> None:
    """The chunk must not reappear after a disk error; nor may the disk be asked in every step."""
    core = make_core(tiers=[disk()])
    store(core, core.request(16, tierkv={"ttl_s": 5}))
    core.finish_all()
    core.begin(5.0)
    core.finish_all(OutcomeKind.FAILED)
    core.begin(5.1)
    assert not core.manager.take_ops(), "suspected for a while"
    core.begin(20.0)
    assert core.ask(core.arrive(16, "b")) == 0
    assert [op.verb for op in core.finish_all()] == [Verb.DELETE]
    assert not len(core.lower[0].residency)
