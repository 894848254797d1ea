"""Promise 4 with the numbers of landscape.md: other systems never answer (G1), forget (G2), or evict their own hits
(G3).
"""

from __future__ import annotations

import pytest
from core_bed import Bed, BedSpec
from core_parts import TierSpec, disk, objects
from core_truth import BedRequest
from simulation.engine.engine import EngineBehaviour

from tierkv.manager.contract import RequestContext
from tierkv.types.tier_ops import TierHealth, Verb


def big_bed(**changes: object) -> Bed:
    """Host tier of 64 chunks over a tier with any chunks that a test adds."""
    fields: dict[str, object] = {
        "slots": 64, "reserved": 64, "gpu_blocks": 1000, "tiers": (disk(),), "gpu_caching": False,
    }  # fmt: skip
    return Bed(BedSpec(**{**fields, **changes}))  # type: ignore[arg-type]  # field names are checked at run time


def prompt(bed: Bed, chunks: int, family: int = 0) -> BedRequest:
    """Prompt of ``chunks`` chunks, unknown to the engine."""
    return bed.core.request([family * 1000 + i for i in range(4 * chunks)], f"family {family}")


def arrive(bed: Bed, chunks: int, family: int = 0) -> BedRequest:
    """Register the same prompt, one token longer."""
    return bed.add([family * 1000 + i for i in range(4 * chunks + 1)])


def steps_until_answered(bed: Bed, count: int, steps_max: int) -> int:
    """Number of steps, with all I/O done in between, until no request waits."""
    for step in range(steps_max):
        if not bed.engine.waiting:
            return step
        bed.step(EngineBehaviour(budget=10_000))
        bed.check()
        bed.run_io()
        bed.run_transfers()
    raise AssertionError(f"{len(bed.engine.waiting)} of {count} requests are still deferred after {steps_max} steps")


@pytest.mark.parametrize("chunks", [65, 100])
@pytest.mark.parametrize("tier", [disk(), objects(), objects(probe_keys_max=10)], ids=["disk", "objects", "probes"])
def test_g1_a_prefix_longer_than_the_host_tier(chunks: int, tier: TierSpec) -> None:
    """G1, the livelock: 64 slots, a prefix of 65 (or 100) chunks below.

    vLLM 0.33 defers forever and reads chunks repeatedly. Here the whole prefix is the answer, within a few steps, and
    each chunk is read once.
    """
    bed = big_bed(tiers=(tier,))
    bed.fill_below(prompt(bed, chunks))
    arrive(bed, chunks)
    assert steps_until_answered(bed, 1, 20) <= 12
    bed.settle()
    assert sum(bed.core.counters.tokens_loaded.values()) == chunks * 4
    assert bed.core.counters.loads_streamed == 1
    assert max(bed.tiers.reads.values()) == 1
    assert len(bed.tiers.reads) == chunks
    bed.check_end()


def test_a_prefix_longer_than_the_cache_of_answers() -> None:
    """A shared tier's answers about 40 chunks, 8 of which are kept. The lookup must not ask for ever."""
    bed = big_bed(tiers=(objects(presence_keys_max=8),))
    bed.fill_below(prompt(bed, 40))
    arrive(bed, 40)
    assert steps_until_answered(bed, 1, 20) <= 12
    bed.settle()
    assert bed.core.counters.tokens_loaded == {"objects": 40 * 4}
    bed.check_end()


def test_g1_with_room_kept_for_stores() -> None:
    """G1: with the default share of slots the answer is no shorter; only fewer chunks are gathered at once."""
    bed = big_bed(reserved=51)
    bed.fill_below(prompt(bed, 65))
    arrive(bed, 65)
    steps_until_answered(bed, 1, 5)
    bed.settle()
    assert bed.core.counters.tokens_loaded == {"disk": 65 * 4}
    assert bed.core.counters.loads_streamed == 1
    bed.check_end()


def test_g2_eight_requests_over_a_full_host_tier() -> None:
    """G2: eight requests of 32 chunks wait; the host tier holds 64 and is full of other chunks.

    vLLM 0.33 answers six of them with nothing though their data is below; here all get all of it.
    """
    bed = big_bed()
    filler = bed.core.request(range(50_000, 50_000 + 64 * 4), "filler")
    bed.core.truth.learn(filler)
    grant = bed.core.manager.prepare_store([(key, 0) for key in bed.core.truth.keys(filler)], RequestContext("filler"))
    assert grant is not None
    for key, ref in zip(grant.keys, grant.slots, strict=True):
        bed.memory[ref.slot] = bed.core.truth.payloads[key]
    bed.core.manager.complete_store(grant.slots)
    for family in range(8):
        bed.fill_below(prompt(bed, 32, family))
    for family in range(8):
        arrive(bed, 32, family)
    steps_until_answered(bed, 8, 60)
    assert bed.core.counters.tokens_loaded == {"disk": 8 * 32 * 4}
    assert max(bed.tiers.reads.values()) == 1
    bed.settle()
    bed.check_end()


def test_g2_the_oldest_is_served_first() -> None:
    """G2: requests get their slots in the order of arrival: none is overtaken forever."""
    bed = big_bed()
    for family in range(8):
        bed.fill_below(prompt(bed, 32, family))
    for family in range(8):
        arrive(bed, 32, family)
    order: list[str] = []
    while bed.engine.waiting:
        bed.step(EngineBehaviour(budget=10_000))
        order += [request_id for request_id in bed.engine.loading if request_id not in order]
        bed.run_io()
        bed.run_transfers()
    assert order == [f"r{i + 1}" for i in range(8)]


@pytest.mark.parametrize("below", ["tail", "head", "odd"])
def test_g3_a_lookup_keeps_its_own_hits(below: str) -> None:
    """G3: 32 chunks of a prefix are in a full host tier of 64, 32 are below.

    vLLM 0.33 evicts the first while it reads the second, and reads all 64. Here 32 are read, wherever in the prefix
    they are.
    """
    bed = big_bed(tiers=(disk(write="read_only"),))
    request = prompt(bed, 64)
    bed.core.truth.learn(request)
    keys = bed.core.truth.keys(request)
    chosen = {"tail": range(32, 64), "head": range(32), "odd": range(1, 64, 2)}[below]
    here = [key for i, key in enumerate(keys) if i not in chosen]
    filler = bed.core.truth.keys(bed.core.request(range(50_000, 50_000 + 32 * 4), "filler"))
    bed.core.put(here)
    bed.core.put(filler)
    for key in here:
        chunk = bed.core.host.slots.get(key)
        assert chunk is not None
        bed.memory[chunk.slot] = bed.core.truth.payloads[key]
    bed.fill_below(request)  # all chunks are in the lower tier, too: only chunks absent from the host may be read
    arrive(bed, 64)
    steps_until_answered(bed, 1, 5)
    assert set(bed.tiers.reads) == {keys[i] for i in chosen}
    assert bed.core.counters.tokens_loaded == {"host": 32 * 4, "disk": 32 * 4}


def test_g3_two_requests_keep_each_others_hits() -> None:
    """G3: chunks gathered for one request are not evicted for the next one, though slots do not suffice for both.

    The second request waits for the first.
    """
    bed = big_bed()
    for family in range(2):
        bed.fill_below(prompt(bed, 40, family))
        arrive(bed, 40, family)
    steps_until_answered(bed, 2, 20)
    assert max(bed.tiers.reads.values()) == 1
    assert len(bed.tiers.reads) == 80


def test_g7_every_tier_hangs() -> None:
    """Promise 4 if no I/O ever ends: each request is answered at its deadline, and computes."""
    bed = big_bed(tiers=(disk(), objects()))
    for family in range(4):
        bed.fill_below(prompt(bed, 32, family))
        arrive(bed, 32, family)
    for _ in range(60):
        bed.step(EngineBehaviour(budget=10_000), seconds=0.1)
        bed.run_transfers()
        bed.check()
    assert not bed.engine.sequences
    assert all(op.verb is not Verb.WRITE or op.slots for op in bed.tiers.pending.values())
    bed.settle()
    bed.check_end()


def test_slow_steps_do_not_defer_for_ever() -> None:
    """Promise 4 if a step takes longer than the deadline: two questions are enough."""
    bed = big_bed(tiers=(objects(),))
    arrive(bed, 32)
    for _ in range(2):
        bed.step(EngineBehaviour(budget=10_000), seconds=7.0)
    assert not bed.engine.waiting


def test_a_streaming_offer_has_no_chunk_of_a_tier_that_failed_meanwhile() -> None:
    """Chunks that an earlier search found are looked up again before the offer.

    The host tier has two of six chunks; a shared tier is asked for the others, and its breaker opens before it has
    answered for the last one. The two chunks are the hit.
    """
    bed = Bed(BedSpec(slots=6, reserved=3, gpu_blocks=48, tiers=(objects(probe_keys_max=3),), gpu_caching=False))
    prompt = bed.core.request(25)
    bed.fill_below(prompt)
    bed.core.put(bed.core.truth.keys(prompt)[:2])
    request = bed.core.arrive(25, "reader")
    bed.core.begin(0.1)
    assert bed.core.ask(request) is None
    first = next(op for op in bed.core.manager.take_ops() if op.verb is Verb.PROBE)
    bed.core.finish(first)
    bed.core.begin(0.2)
    assert bed.core.ask(request) is None
    bed.core.manager.on_completion(TierHealth(0, usable=False))
    bed.core.begin(0.3)
    assert bed.core.ask(request) == 8
