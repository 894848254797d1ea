"""Lookups of groups with windows or states: chunks asked about, waited for and gathered."""

from __future__ import annotations

import pytest
from core_blocks import blocks
from core_parts import disk, make_core, objects
from group_parts import full, ssm, window
from stream_parts import FAILURES

from tierkv.types.engine import StepOutput
from tierkv.types.tier_ops import OutcomeKind, Verb


def test_s37_windowed_model_leaves_the_last_token() -> None:
    """S37: with a window the answer is one token short of the prompt; without, the engine subtracts it."""
    core = make_core(groups=[full(), window(8)])
    request = core.arrive(16)
    core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    assert core.ask(request) == 15
    assert core.ask(request, computed=8) == 7
    granted = core.manager.passages.granted("a").keys()
    assert granted == {*core.truth.keys(request, 0)[2:], *core.truth.keys(request, 1)[2:]}


def test_a_state_ends_with_its_chunk() -> None:
    """A state after 16 tokens is not the one after 15: of 16 tokens, 12 are answered, of 17 all 16."""
    core = make_core(groups=[ssm()])
    request, longer = core.arrive(16), core.arrive(17, "longer")
    core.put(core.truth.keys(longer))
    assert core.ask(request) == 12
    assert core.ask(longer) == 16
    assert core.manager.passages.granted("longer").keys() == {core.truth.keys(longer)[3]}


def test_of_a_window_only_the_end_is_read() -> None:
    """The prefix of one group, the last two chunks of the other: no other chunk is read."""
    core = make_core(groups=[window(8), full()], tiers=[disk()])
    request = core.arrive(41)
    recent, prefix = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.keep_below([*recent, *prefix])
    assert core.ask(request) is None
    ops = core.manager.take_ops()
    assert {op.verb for op in ops} == {Verb.READ}
    assert sorted(key for op in ops for key in op.keys) == sorted([*prefix, *recent[-2:]])
    for op in ops:
        core.finish(op)
    assert core.ask(request) == 40


def test_s34_what_is_being_stored_counts_for_the_window() -> None:
    """S34: a chunk whose store is in flight completes the window; outside of it, no request waits for it."""
    core = make_core(groups=[window(8)])
    writer = core.arrive(24, "w")
    (store,) = core.schedule(writer, computed=0, scheduled=8, ids=[[1, 2]]).stores
    core.put(core.truth.keys(writer)[2:5])
    assert core.ask(core.arrive(21, "r")) == 20, "chunks 3 and 4 are enough"
    inside = core.arrive(13, "i")
    assert core.ask(inside) is None
    core.report(store.job_id)
    assert core.ask(inside) == 12


def test_probes_of_a_window_go_out_at_once() -> None:
    """A shared tier is asked about the whole prefix of one group, and about all chunks of the other's window.

    One round suffices, whatever the answers.
    """
    core = make_core(groups=[full(), window(8)], tiers=[objects()])
    request = core.arrive(25)
    prefix, recent = core.truth.keys(request, 0), core.truth.keys(request, 1)
    assert core.ask(request) is None
    probes = core.manager.take_ops()
    assert {key for probe in probes for key in probe.keys} == {*prefix, *recent}
    there = {*prefix[:5], *recent[1:4]}
    for probe in probes:
        core.finish(probe, [OutcomeKind.OK if key in there else OutcomeKind.ABSENT for key in probe.keys])
    assert core.ask(request) is None
    ops = core.manager.take_ops()
    assert {(op.verb, key) for op in ops for key in op.keys} == {
        (Verb.READ, key) for key in [*prefix[:4], *recent[2:4]]
    }
    for op in ops:
        core.finish(op)
    assert core.ask(request) == 16


@pytest.mark.parametrize("reserved", [4, 10, 21])
def test_g1_a_windowed_prefix_longer_than_the_host_tier(reserved: int) -> None:
    """G1: a prefix of 40 chunks with a window of two needs 42 slots; with fewer its load streams.

    If half of the slots that may be reserved do not hold the window and a chunk more, the longest part that fits is
    answered. A model with windows only needs no more slots than those.
    """
    core = make_core(groups=[full(), window(8)], slots=21, reserved=reserved, tiers=[disk()])
    request = core.arrive(161)
    core.keep_below([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == (160 if reserved > 4 else 8)
    held = core.manager.passages.granted("a").keys()
    assert held >= {*core.truth.keys(request, 1)[38 if reserved > 4 else 0 :][:2]}
    core = make_core(groups=[window(8)], slots=21, reserved=reserved, tiers=[disk()])
    request = core.arrive(161)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 160


@pytest.mark.parametrize("kind", FAILURES)
def test_a_read_that_fails_in_a_window(kind: OutcomeKind) -> None:
    """One chunk of the window cannot be read: the next present window is the answer, after one more read."""
    core = make_core(groups=[full(), window(8)], tiers=[disk(write="read_only")])
    request = core.arrive(41)
    prefix, recent = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.put(prefix)
    core.keep_below(recent)
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    assert read.keys == tuple(recent[8:])
    core.finish(read, [OutcomeKind.OK, kind])
    assert core.ask(request) is None
    (read,) = (op for op in core.manager.take_ops() if op.verb is Verb.READ)
    assert read.keys == (recent[7],), "chunk 8 is here by now"
    core.finish(read)
    assert core.ask(request) == 36
    core.scheduler.validate()


def test_s50_overlap_outside_the_window() -> None:
    """S50: the chunk that another request loads is before this one's window: this one does not wait for it."""
    core = make_core(groups=[window(4)])
    first, second = core.arrive(17, "f"), core.arrive(29, "s")
    core.put(core.truth.keys(second))
    assert core.ask(first) == 16
    core.scheduler.update_state_after_alloc(first, [blocks([0, 0, 0, 4, 5])], 16)
    assert core.ask(second) == 28


def test_s49_overlap_inside_the_window() -> None:
    """S49, S50: the same window delays the request."""
    core = make_core(groups=[window(4)])
    first, second = core.arrive(17, "f"), core.arrive(18, "s")
    core.put(core.truth.keys(second))
    assert core.ask(first) == 16
    core.scheduler.update_state_after_alloc(first, [blocks([0, 0, 0, 4, 5])], 16)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert core.ask(second) is None
    core.report(load.job_id)
    assert core.ask(second) == 16


def test_any_group_can_change_the_question() -> None:
    """Hashes become known late: a chunk of the second group appears, none of the first, and the hit grows."""
    core = make_core(groups=[full(3), full(2)], hash_block_tokens=1)
    request = core.arrive(10)
    core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    request.hashes_withheld = 1
    assert core.ask(request) == 8
    request.hashes_withheld = 0
    assert core.ask(request) == 9


def test_a_further_token_changes_the_question() -> None:
    """With a window the engine computes the last token; with one more token, the previous one is not the last."""
    core = make_core(groups=[full(), window(8)])
    request = core.arrive(16)
    core.put([*core.truth.keys(request, 0), *core.truth.keys(request, 1)])
    assert core.ask(request) == 15
    request.extend([16])
    assert core.ask(request) == 16
