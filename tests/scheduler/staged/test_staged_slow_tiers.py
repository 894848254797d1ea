"""Lookups of engines that schedule themselves leave out tiers that are slower than computing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import Core, TierSpec, disk, make_core, objects
from group_parts import window
from staged_bed import StagedBed, prefix

from tierkv.manager.lower.read_speed import READINGS_MIN
from tierkv.scheduler.lookup.prefill_rate import PREFILL_TOKENS_MIN, SAMPLES_MIN
from tierkv.types.engine import GroupSpec
from tierkv.types.tier_ops import Verb

TOKENS_PER_S = 1000.0
"""Prefill: a chunk of 4 tokens in 4 ms."""
CHUNKS = 40
FAST_S, SLOW_S = 0.0001, 0.1
"""Seconds in which a tier reads a chunk."""


def bed_of(
    *tiers: TierSpec, rate: float | None = TOKENS_PER_S, chunk_s: float, groups: Sequence[GroupSpec] | None = None
) -> StagedBed:
    """Bed over tiers that all have the chunks of a prompt, the first of which was measured."""
    core = make_core(slots=256, tiers=tiers, groups=groups)
    for number in range(len(tiers)):
        core.keep_below(prefix(CHUNKS), number)
    teach(core, chunk_s)
    return StagedBed(core, rate=rate)


def teach(core: Core, chunk_s: float, tier: int = 0) -> None:
    """Measure reads of a tier."""
    for _ in range(READINGS_MIN):
        speed = core.manager._tier_io.reads[tier].speed
        speed.measured(32 * core.geometry.payload_bytes_max, 32 * chunk_s)


@pytest.mark.parametrize("tier", [disk(), objects()])
def test_a_slow_tier_is_left_out(tier: TierSpec) -> None:
    """Its chunks are misses, and one of them is read to measure it again; a fast tier gives all of its own."""
    slow, fast = bed_of(tier, chunk_s=SLOW_S), bed_of(tier, chunk_s=FAST_S)
    assert slow.answer("a", prefix(CHUNKS)) == 0
    assert fast.answer("a", prefix(CHUNKS)) == CHUNKS
    assert slow.core.counters.slowdowns[tier.name] == 1
    assert not fast.core.counters.slowdowns[tier.name]


def test_a_slow_tier_is_measured_again_and_serves_when_it_is_fast() -> None:
    """It is read a chunk at a time, by requests that are not kept waiting. Within three seconds it counts as fast."""
    bed = bed_of(disk(), chunk_s=SLOW_S)
    read = 0
    for number in range(12):
        bed.begin(0.25)
        bed.ask(f"r{number}", prefix(CHUNKS)[number:])
        bed.end()
        ops = bed.core.manager.take_ops()
        reads = [op for op in ops if op.verb is Verb.READ]
        if sum([len(op.keys) for op in reads]) > 1:
            break
        read += len(reads)
        for op in ops:
            bed.core.finish(op, elapsed_s=FAST_S * len(op.keys))
    else:
        raise AssertionError("the tier stays left out")
    assert read
    assert bed.core.counters.recoveries["disk"] == 1


def test_the_step_behind_a_prompt_is_measured_too() -> None:
    """It may be the one in which the prompt is computed, so no rest begins before its end."""
    bed = bed_of(disk(), rate=None, chunk_s=FAST_S)
    bed.add("a")
    for tokens, seconds, may_rest in ((0, 0.01, True), (1000, 0.01, False), (0, 1.0, True)) * SAMPLES_MIN:
        bed.begin(seconds)
        bed.lookups.end_step(tokens)
        assert bed.lookups.may_rest() is may_rest
    assert bed.lookups.prefill_tokens_per_s == pytest.approx(1000.0)


def test_chunks_in_the_host_tier_and_in_a_faster_tier_count() -> None:
    """Only what would be read from the slow tier is a miss; one of its chunks is read to measure it."""
    core = make_core(slots=256, tiers=[disk(name="slow"), disk(name="fast")])
    keys = prefix(CHUNKS)
    core.keep_below(keys[:10], 1)
    core.keep_below(keys[10:], 0)
    teach(core, SLOW_S)
    assert StagedBed(core, rate=TOKENS_PER_S).answer("a", keys) in {10, 11}


def test_a_request_that_waits_learns_that_its_tier_has_become_slow() -> None:
    """It has waited for reads, which it does not want any more."""
    bed = bed_of(disk(), chunk_s=FAST_S)
    assert bed.ask("a", prefix(CHUNKS)) is None
    bed.end()
    assert bed.core.manager.passages.get("a") is not None
    for _ in range(12):
        teach(bed.core, 10 * SLOW_S)
    bed.begin(0.01)
    assert bed.ask("a", prefix(CHUNKS)) == 0
    bed.end()
    passage = bed.core.manager.passages.get("a")
    assert passage is None or not [*passage.granted()]


@pytest.mark.parametrize("rate", [None, 1.0])
def test_without_a_rate_or_with_a_slow_engine_all_tiers_serve(rate: float | None) -> None:
    """Nothing is left out before the engine's speed is known."""
    assert bed_of(disk(), rate=rate, chunk_s=SLOW_S).answer("a", prefix(CHUNKS)) == CHUNKS


def test_with_windows_no_tier_is_left_out() -> None:
    """The few chunks of a window serve many tokens, which no time per token shows."""
    bed = bed_of(disk(), chunk_s=SLOW_S, groups=[window(16)])
    for _ in range(20):
        bed.begin(0.01)
        end = bed.ask_window("a", prefix(CHUNKS), 4)
        bed.end()
        if end is not None:
            break
        bed.run_io()
    assert end == CHUNKS


def test_the_rate_is_measured_from_the_steps() -> None:
    """The engine tells the prompt tokens that it has computed since the previous step."""
    bed = bed_of(disk(), rate=None, chunk_s=SLOW_S)
    for _ in range(SAMPLES_MIN + 1):
        bed.begin(2 * PREFILL_TOKENS_MIN / TOKENS_PER_S)
        bed.lookups.end_step(2 * PREFILL_TOKENS_MIN)
    assert bed.lookups.prefill_tokens_per_s == pytest.approx(TOKENS_PER_S)
    assert bed.answer("a", prefix(CHUNKS)) == 0
