"""I/O that misses its deadline: no request waits for it any more, and its slots stay held until it has ended."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core, objects

from tierkv.manager.contract import RequestContext
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierOp, Verb

WHO = RequestContext("a")


def run(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


def only(core: Core, verb: Verb) -> TierOp:
    """This step's single instruction."""
    (op,) = core.manager.take_ops()
    assert op.verb is verb
    return op


def late(core: Core, op: TierOp) -> None:
    """The deadline of an instruction passes."""
    core.manager.on_completion(
        Completion(op.op_id, tuple(Outcome(OutcomeKind.TIMED_OUT) for _ in op.keys), ended=False)
    )


def read_one(core: Core) -> TierOp:
    """The read of chunk 0, which is in the lower tier and wanted by a request."""
    core.manager.passages.reserve(WHO.request_id, tuple(run(0, 1)), WHO.hints)
    return only(core, Verb.READ)


def test_a_corrupt_frame_that_is_being_written_anew() -> None:
    """A deletion could remove the new frame. The write replaces the corrupt frame, so nothing is deleted."""
    core = make_core(tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    read = read_one(core)
    late(core, read)
    core.put([key])
    write = only(core, Verb.WRITE)
    core.begin(6.0)
    again = core.host.slots.find(key)
    assert again is not None
    core.manager.passages.release(WHO.request_id)
    core.host.drop([again])
    second = read_one(core)
    core.finish(second, OutcomeKind.CORRUPT)
    assert not core.manager.take_ops()
    core.finish(write)
    core.finish(read)
    assert core.lower[0].presence(key, 6.0) is LookupResult.HIT
    core.manager.validate()


def test_a_chunk_that_is_gone_is_counted() -> None:
    """A removed directory was visible in two lines of the log, and in no number: hits became misses."""
    core = make_core(slots=1, tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    core.finish(read_one(core), OutcomeKind.ABSENT)
    assert core.counters.reads_absent == {"disk": 1}
    assert core.counters.reads_failed == {}
    assert core.lower[0].presence(key, 6.0) is LookupResult.MISS


def test_a_late_read_keeps_its_slot() -> None:
    """The deadline passed and the read runs on: the chunk is a miss at once, but its slot is not reused before the read
    has truly ended; what it then brings is ignored."""
    core = make_core(slots=1, tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    read = read_one(core)
    late(core, read)
    late(core, read)
    core.manager.passages.release(WHO.request_id)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    assert core.manager.prepare_store([(run(9, 1)[0], 0)], WHO) is None
    assert core.counters.reads_failed == {"disk": 1}
    core.finish(read)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    assert core.counters.promotions == {}
    assert core.manager.prepare_store([(run(9, 1)[0], 0)], WHO) is not None
    core.manager.validate()


def test_a_late_read_and_a_new_one() -> None:
    """While the first read hangs in its slot, the chunk can be fetched into another one; the two do not mix."""
    core = make_core(tiers=[disk()])
    (key,) = run(0, 1)
    core.keep_below([key])
    first = read_one(core)
    late(core, first)
    core.begin(6.0)
    second = read_one(core)
    assert second.slots != first.slots
    core.finish(first, OutcomeKind.FAILED)
    assert core.manager.lookup(key, WHO) is LookupResult.PENDING
    core.finish(second)
    assert core.ready() == {key}


def test_a_late_write_keeps_its_slot() -> None:
    """A late write still uses its slot; the chunk counts as stored when the tier reports it."""
    core = make_core(slots=1, tiers=[disk(frames=3)])
    (key,) = run(0, 1)
    core.put([key])
    write = only(core, Verb.WRITE)
    late(core, write)
    assert core.host.room == 0
    assert core.manager.has_pending_changes
    core.finish(write)
    assert core.lower[0].presence(key, 0.0) is LookupResult.HIT
    assert core.host.room == 1


def refused_and_stored_again(core: Core) -> tuple[Key, TierOp]:
    """A chunk whose bad frame is being deleted, and that the host tier has again before that has ended."""
    (key,) = run(0, 1)
    core.keep_below([key])
    core.finish(read_one(core), OutcomeKind.CORRUPT)
    deletion = only(core, Verb.DELETE)
    core.put([key])
    assert not core.manager.take_ops(), "the deletion could undo a write"
    return key, deletion


def test_a_chunk_that_comes_back_before_its_bad_frame_is_gone() -> None:
    """The tier gets it after the deletion. Otherwise only memory has it, and a flush reports it as written."""
    core = make_core(tiers=[disk()])
    key, deletion = refused_and_stored_again(core)
    assert core.manager.has_pending_changes
    assert core.lower[0].has_backlog
    core.finish(deletion)
    core.finish(only(core, Verb.WRITE))
    assert core.lower[0].presence(key, 0.0) is LookupResult.HIT
    assert not core.manager.has_pending_changes
    assert core.counters.cascades == {"disk": 1}
    core.manager.validate()


def test_a_chunk_that_comes_back_and_leaves_before_its_bad_frame_is_gone() -> None:
    """Nothing waits for a chunk that memory has lost meanwhile."""
    core = make_core(tiers=[disk()])
    _, deletion = refused_and_stored_again(core)
    core.manager.reset_cache()
    core.finish(deletion)
    assert not core.manager.take_ops()
    assert not core.manager.has_pending_changes
    assert not core.lower[0].has_backlog


def test_a_chunk_that_comes_back_while_nobody_knows_what_lies_there() -> None:
    """A write that may have arrived is to be deleted, and that fails: it is tried again some time, for which neither a
    flush nor an idle engine waits."""
    core = make_core(tiers=[disk()])
    (key,) = run(0, 1)
    core.put([key])
    core.finish(only(core, Verb.WRITE), OutcomeKind.TIMED_OUT)
    deletion = only(core, Verb.DELETE)
    core.manager.reset_cache()
    core.put([key])
    assert core.manager.has_pending_changes
    core.finish(deletion, OutcomeKind.FAILED)
    assert not core.manager.take_ops()
    assert not core.manager.has_pending_changes
    assert not core.lower[0].has_backlog
    assert core.counters.cascades_dropped == {"disk": 1}
    core.manager.validate()


@pytest.mark.parametrize("verb", [Verb.WRITE, Verb.DELETE])
def test_nobody_steps_for_a_tier_that_hangs(verb: Verb) -> None:
    """An idle engine keeps stepping while chunks wait for a tier. For a late tier it would never stop."""
    core = make_core(tiers=[disk(queue=1)])
    keys = run(0, 3)
    if verb is Verb.DELETE:
        core.keep_below(keys)
        core.manager.reset_cache("all")
        core.begin(1.0)
    else:
        core.put(keys)
    op = only(core, verb)
    (tier,) = core.lower
    assert tier.has_backlog
    late(core, op)
    late(core, op)
    assert not tier.has_backlog
    core.finish(op)
    assert tier.has_backlog, "it goes on"
    core.manager.validate()


def test_a_late_probe_is_a_no() -> None:
    """No request waits for a late probe. Its answer is outdated when it arrives, so it is ignored, and a later lookup
    asks again."""
    core = make_core(tiers=[objects()])
    (key,) = run(0, 1)
    assert core.manager.lookup(key, WHO) is LookupResult.RETRY
    probe = only(core, Verb.PROBE)
    late(core, probe)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    core.finish(probe)
    assert core.manager.lookup(key, WHO) is LookupResult.MISS
    core.begin(1.0)
    assert core.manager.lookup(key, WHO) is LookupResult.RETRY
    assert only(core, Verb.PROBE).keys == (key,)
