"""Both sides of the connector over a real stack, vLLM's calls made by hand: what an engine in bulk cannot show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_by_hand import (  # noqa: E402 - needs torch
    BLOCK_TOKENS,
    ByHand,
    CacheConfig,
    PlayedRequest,
    blocks_of,
    scheduler_output,
)

from tierkv.errors import EngineProtocolError  # noqa: E402 - (the same)
from tierkv.integrations.vllm.connector.worker import ConnectorWorker  # noqa: E402 - (the same)
from tierkv.integrations.vllm.identity.adapters import Adapters  # noqa: E402 - (the same)
from tierkv.types.transfers import ConnectorMeta  # noqa: E402 - (the same)

pytestmark = pytest.mark.needs_torch

HOST = {"host": {"capacity": "1MiB"}, "lookup": {"recompute": "off"}}
PROMPT = list(range(1, 4 * BLOCK_TOKENS + 1))
FIRST = [[1, 2, 3, 4], [5, 6, 7, 8]]
SECOND = [[11, 12, 13, 14], [15, 16, 17, 18]]


def request(name: str, **more: object) -> PlayedRequest:
    """One of many requests for the same prompt."""
    return PlayedRequest(name, list(PROMPT), **more)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_what_was_computed_comes_back_to_other_blocks(groups: int, ranks: int, blocks_per_chunk: int) -> None:
    """Every rank's bytes of every group and layer, through shared memory and pickled messages."""
    with ByHand({**HOST, "chunk": {"blocks": blocks_per_chunk}}, groups=groups, ranks=ranks) as hand:
        first, second = FIRST[:groups], SECOND[:groups]
        hand.compute(request("one"), first, mark=3)
        before = [[hand.blocks(rank, g, first[g]) for g in range(groups)] for rank in range(ranks)]
        assert all(bool((part != 0).all()) for parts in before for part in parts)
        hand.clear()
        assert hand.begin_load(request("two"), second) == len(PROMPT)
        assert hand.settle().finished == {"two"}
        for rank in range(ranks):
            for g in range(groups):
                assert torch.equal(hand.blocks(rank, g, second[g]), before[rank][g])
        assert dict(hand.scheduler.loaded_by_tier("two")) == {"host": len(PROMPT)}
        assert not hand.scheduler.loaded_by_tier("one")


def test_a_request_with_an_adapter_is_part_of_its_clients_trace() -> None:
    """The stack gets a view of such a request, and the spans of its tiers belong to the trace all the same."""
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    with ByHand(HOST) as hand:
        arrived = request(
            "one", lora_request=SimpleNamespace(lora_name="french", lora_int_id=1, lora_path=""), trace_headers=headers
        )
        hand.scheduler.on_new_request(arrived)
        assert hand.scheduler.stack._scheduler.view.trace_headers("one") == headers


def test_the_setup_is_sent_until_all_workers_have_begun() -> None:
    """It is larger than most messages, and of no use to a worker that has it."""
    with ByHand(HOST, ranks=2) as hand:
        assert hand.scheduler.has_pending_work, "vLLM takes a step before its first request"
        hand.step()
        assert hand.sent[0] is not None
        assert not hand.scheduler.has_pending_work
        hand.step()
        assert hand.sent[0] is None
        hand.compute(request("one"), FIRST[:1], mark=1)


def test_a_damaged_chunk_is_told_by_its_blocks() -> None:
    """With one group vLLM keeps what is in front of the first such block, and computes the rest."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        before = hand.blocks(0, 0, FIRST[0])
        hand.damage(slots=[2])  # slots are given out in order: the third chunk
        hand.begin_load(request("two"), SECOND[:1])
        reports = hand.settle()
        assert (reports.finished, reports.failed, reports.invalid) == ({"two"}, set(), {SECOND[0][2]})
        kept = [0, 1, 3]
        assert torch.equal(hand.blocks(0, 0, [SECOND[0][i] for i in kept]), before[:, kept])
        three = request("three")
        hand.scheduler.on_new_request(three)
        assert hand.ask(three) == 2 * BLOCK_TOKENS, "the damaged chunk is gone"


def test_no_load_is_offered_while_failed_ones_stop_the_engine() -> None:
    """VLLM reserves the blocks of a prompt whose load failed. If these are all, it takes no offer, and nothing runs."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        hand.damage(slots=[2])
        failed, other = request("failed"), request("other")
        hand.begin_load(failed, SECOND[:1])
        assert hand.settle().invalid
        hand.scheduler.on_new_request(other)
        assert hand.ask(other) == 2 * BLOCK_TOKENS
        hand.step()  # the offer was not taken, and nothing else was scheduled
        assert hand.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        hand.step(scheduler_output([(failed, 0, SECOND[:1])]))
        assert hand.ask(other) >= 2 * BLOCK_TOKENS
        hand.step()  # no blocks are reserved any more: a full device, which will not stay full
        assert hand.ask(other) >= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("rank", [0, 1])
def test_the_damage_of_one_rank_is_everybodys(rank: int) -> None:
    """Each worker checks its own part of a chunk. vLLM must get the failure once, from any worker."""
    with ByHand(HOST, ranks=2) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        part_bytes = hand.scheduler.stack.geometry.groups[0].worker_bytes
        hand.damage(rank * part_bytes, slots=[1])
        hand.begin_load(request("two"), SECOND[:1])
        reports = hand.settle()
        assert (reports.finished, reports.failed, reports.invalid) == ({"two"}, set(), {SECOND[0][1]})


def test_with_groups_a_load_fails_as_a_whole() -> None:
    """Block ids are not unique over groups, so vLLM refuses reports by block."""
    with ByHand(HOST, groups=2) as hand:
        hand.compute(request("one"), FIRST, mark=3)
        hand.damage(slots=[2])
        hand.begin_load(request("two"), SECOND)
        reports = hand.settle()
        assert (reports.finished, reports.failed, reports.invalid) == ({"two"}, {"two"}, set())


def test_a_load_that_a_reset_has_overtaken_fails() -> None:
    """Weights may have changed: bytes from before the reset must not count as a hit, even if they are whole."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        hand.begin_load(request("two"), SECOND[:1])
        meta, _, _ = hand.start()
        hand.workers[0].queue_stores(meta)
        hand.workers[0].drain()  # the bytes are copied, and not reported yet
        assert hand.scheduler.reset_cache()
        assert hand.take_reports().finished == set(), "removed from the report to vLLM"
        assert hand.scheduler.has_pending_work, "vLLM must come for the rest"
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"two"}, {"two"})
        other = request("three")
        hand.scheduler.on_new_request(other)
        assert hand.ask(other) == 0, "no previous chunk is found"


def test_after_a_reset_a_request_may_load_again() -> None:
    """Only what loaded when the cache was emptied is of the past, not all that its request will ever load."""
    with ByHand(HOST) as hand:
        two = request("two")
        for _ in range(2):  # before the first reset it has loaded in peace, before the second it loads
            hand.compute(request("one"), FIRST[:1], mark=3)
            assert hand.begin_load(two, SECOND[:1]) == len(PROMPT)
            assert hand.settle().failed == set()
            assert hand.scheduler.reset_cache()
            hand.compute(request("one"), FIRST[:1], mark=3)
            assert hand.begin_load(two, SECOND[:1]) == len(PROMPT)
            reports = hand.settle()
            assert (reports.finished, reports.failed) == ({"two"}, set())
            assert dict(hand.scheduler.loaded_by_tier("two")) == {"host": len(PROMPT)}, "of this load alone"
            hand.begin_load(two, SECOND[:1])
            hand.start()
            assert hand.scheduler.reset_cache()
            assert hand.settle().failed == {"two"}


def test_what_was_told_is_not_told_again() -> None:
    """A message that repeats all earlier ones grows without bound."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        assert hand.workers[0].take_output() is None
        assert hand.workers[0].take_results().finished == set()


def test_an_overtaken_load_of_which_nobody_waits_is_told_once() -> None:
    """The request was aborted: vLLM frees its blocks when the load is reported, so it must be reported."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        two = request("two")
        hand.begin_load(two, SECOND[:1])
        hand.start()
        hand.scheduler.request_finished(two, tuple(SECOND[:1]))
        assert hand.scheduler.reset_cache()
        hand.workers[0].drain()
        assert hand.take_reports().finished == set()
        assert hand.settle().finished == {"two"}
        assert hand.settle().finished == set()


def test_steps_that_overlap() -> None:
    """With asynchronous scheduling, a step is scheduled before the result of the previous one is known."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        before = hand.blocks(0, 0, FIRST[0])
        hand.clear()
        hand.begin_load(request("two"), SECOND[:1])
        hand.start()
        hand.workers[0].drain()
        heard = hand.collect()  # reported by the worker, not yet by vLLM
        three = request("three")
        hand.scheduler.on_new_request(three)
        assert hand.scheduler.get_num_new_matched_tokens(three, 0) == (None, False), (
            "what two loads is not loaded twice"
        )
        hand.start()
        assert hand.scheduler.reset_cache()
        output, started_workers, reports = heard
        hand.scheduler.process_output(output, started_workers, reports.finished)
        assert reports.finished == set()
        assert torch.equal(hand.blocks(0, 0, SECOND[0]), before), "the bytes came; they are of the past all the same"
        assert hand.take_reports().finished == set()
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"two"}, {"two"})


def test_a_reset_within_a_step_is_put_off() -> None:
    """Its loads are not handed out yet. False is what vLLM expects then, not an exception."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        hand.begin_load(request("two"), SECOND[:1])
        assert hand.scheduler.reset_cache() is False
        assert hand.settle().finished == {"two"}
        assert hand.scheduler.reset_cache() is True


def test_the_load_of_an_aborted_request_is_told_all_the_same() -> None:
    """VLLM holds the blocks of a loading request until then."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        two = request("two")
        hand.begin_load(two, SECOND[:1])
        hand.start()
        hand.scheduler.request_finished(two, tuple(SECOND[:1]))
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"two"}, set())


def test_blocks_that_tierkv_cannot_load_into_are_computed() -> None:
    """Whatever vLLM allocates in a way we do not know must cost one computation, not the engine."""
    with ByHand(HOST) as hand:
        hand.compute(request("one"), FIRST[:1], mark=3)
        assert hand.begin_load(request("two"), [SECOND[0][:2]]) == len(PROMPT)  # a table that is too short
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"two"}, {"two"})


def test_adapters_and_salts_have_caches_of_their_own() -> None:
    """The same tokens through other weights are other bytes, also where an engine's hashes would not tell."""
    adapter = SimpleNamespace(lora_name="french", lora_int_id=4, lora_path="/adapters/french")
    with ByHand(HOST) as hand:
        hand.compute(request("one", lora_request=adapter), FIRST[:1], mark=3)
        hand.compute(request("salted", cache_salt="theirs"), SECOND[:1], mark=5)
        for name, more, found in [
            ("plain", {}, 0),
            ("adapter", {"lora_request": adapter}, len(PROMPT)),
            ("other", {"lora_request": SimpleNamespace(lora_name="german", lora_int_id=5, lora_path="")}, 0),
            ("salted again", {"cache_salt": "theirs"}, len(PROMPT)),
            ("salted otherwise", {"cache_salt": "mine"}, 0),
        ]:
            asked = request(name, **more)
            hand.scheduler.on_new_request(asked)
            assert hand.ask(asked) == found, name
            hand.scheduler.request_finished(asked, ())


def test_an_adapter_trained_again_in_its_folder_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Another server has the old name, number and path, and other weights: old KV there would be wrong tokens."""
    weights = tmp_path / "adapter_model.safetensors"
    with ByHand(HOST) as hand:
        found = []
        for content in (b"first", b"other", b"first"):
            weights.write_bytes(content)
            hand.scheduler.inner._adapters = Adapters()  # a new server
            adapter = SimpleNamespace(lora_name="french", lora_int_id=4, lora_path=str(tmp_path))
            asked = request(f"asked {len(found)}", lora_request=adapter)
            hand.scheduler.on_new_request(asked)
            found.append(hand.ask(asked))
            hand.scheduler.request_finished(asked, ())
            if not found[-1]:
                blocks = (FIRST, SECOND)[len(found) - 1][:1]
                hand.compute(request(f"computed {len(found)}", lora_request=adapter), blocks, mark=3)
    assert found == [0, 0, len(PROMPT)]


def test_what_is_not_served_is_neither_stored_nor_asked() -> None:
    """Streamed sessions take their tokens back; a user may say that the cache is not to be read."""
    with ByHand(HOST) as hand:
        streamed = request("streamed", resumable=True)
        hand.compute(streamed, FIRST[:1], mark=3)
        assert hand.scheduler.stack.metrics.counters.chunks_stored == 0
        hand.compute(request("one"), FIRST[:1], mark=3)
        for unasked in (request("streamed too", resumable=True), request("unread", skip_reading_prefix_cache=True)):
            hand.scheduler.on_new_request(unasked)
            assert hand.scheduler.get_num_new_matched_tokens(unasked, 0) == (0, False)


@pytest.mark.parametrize(
    ("places", "served"),
    [
        ([], True),
        ([(0, 8)], True),
        ([(2, 3), (5, 3), (9, 1)], True),
        ([(2, 4), (2, 4)], False),
        ([(2, 5), (6, 9)], False),
    ],
)
def test_media_that_share_their_places_are_not_served(places: list[tuple[int, int]], *, served: bool) -> None:
    """VLLM's hash of a block names one of them only, so other sounds of the same frames would be found."""
    media = [SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length)) for offset, length in places]
    with ByHand(HOST) as hand:
        hand.compute(request("one", mm_features=media), FIRST[:1], mark=3)
        assert bool(hand.scheduler.stack.metrics.counters.chunks_stored) is served
        again = request("two", mm_features=media)
        hand.scheduler.on_new_request(again)
        found = hand.ask(again) if served else hand.scheduler.get_num_new_matched_tokens(again, 0)[0]
        assert found == (len(PROMPT) if served else 0)


def test_hints_reach_the_stack() -> None:
    """Hints are in ``kv_transfer_params`` of the sampling parameters, which vLLM passes on."""
    with ByHand(HOST) as hand:
        hand.compute(request("one", kv_transfer_params={"tierkv": {"store": False}}), FIRST[:1], mark=3)
        assert hand.scheduler.stack.metrics.counters.chunks_stored == 0
        hand.compute(request("two"), FIRST[:1], mark=3)
        few = request("three", kv_transfer_params={"tierkv": {"max_load_tokens": 2 * BLOCK_TOKENS}})
        hand.scheduler.on_new_request(few)
        assert hand.ask(few) == 2 * BLOCK_TOKENS


def test_what_the_last_step_left_is_not_lost(tmp_path: Path) -> None:
    """An engine in one process ends without another step: what its last step computed is still with the worker."""
    stack = {**HOST, "tiers": [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB"}]}
    hand = ByHand(stack)
    one = request("one")
    hand.scheduler.on_new_request(one)
    hand.ask(one)
    hand.scheduler.update_state_after_alloc(one, blocks_of(FIRST[:1]), 0)
    hand.step(scheduler_output([(one, 0, FIRST[:1])]), lambda: hand.fill(FIRST[:1], 3), local=True)
    hand.scheduler.request_finished(one, tuple(FIRST[:1]))
    assert hand.scheduler.has_pending_work
    hand.close()  # workers first, as vLLM does
    hand.close()
    with ByHand(stack) as again:
        two = request("two")
        again.scheduler.on_new_request(two)
        assert again.ask(two) == len(PROMPT)


def test_a_worker_needs_its_setup_and_its_memory() -> None:
    """A step before the setup is a defect of the engine's side, reported by name."""
    with ByHand(HOST) as hand:
        made = hand.scheduler.build(scheduler_output())
        bare = ConnectorWorker(CacheConfig(), 0)
        with pytest.raises(EngineProtocolError, match="KV tensors"):
            bare.start_step(made.meta, made.setup, made.failed_loads, None)
        bare.register_kv_caches(CacheConfig().memory())
        with pytest.raises(EngineProtocolError, match="its setup"):
            bare.start_step(made.meta, None, made.failed_loads, None)


def test_a_worker_whose_memory_is_another_says_so() -> None:
    """Scheduler and workers read their configurations apart; bytes must not move where they disagree."""
    with ByHand(HOST, groups=2) as hand:
        made = hand.scheduler.build(scheduler_output())
        other = ConnectorWorker(CacheConfig(1), 0)
        other.register_kv_caches(CacheConfig(1).memory())
        with pytest.raises(EngineProtocolError, match="caches of 1 groups were registered, the spec has 2"):
            other.start_step(made.meta, made.setup, made.failed_loads, None)
        other.shutdown()


LONG = list(range(1, 16 * BLOCK_TOKENS + 1))


def over_disk(path: Path, capacity: str, groups: int = 1) -> ByHand:
    """A host tier over a disk. 64KiB are eight chunks."""
    disk = {"backend": "disk", "path": str(path), "capacity": "8MiB"}
    return ByHand({"host": {"capacity": capacity}, "lookup": {"recompute": "off"}, "tiers": [disk]}, groups=groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_load_in_several_jobs_is_told_once(groups: int, tmp_path: Path) -> None:
    """A prefix longer than the host tier is loaded in segments; vLLM must wait for the last one."""
    ids = [list(range(1, 17)), list(range(17, 33))][:groups]
    with over_disk(tmp_path, "1MiB", groups) as hand:
        hand.compute(PlayedRequest("one", LONG), ids, mark=3)
        before = [hand.blocks(0, g, ids[g]) for g in range(groups)]
    with over_disk(tmp_path, "64KiB", groups) as hand:
        segments: list[int] = []
        start_step = hand.workers[0].start_step

        def counting(meta: ConnectorMeta, *rest: Any, **more: Any) -> None:
            segments.extend(len(job.keys) for job in meta.loads)
            start_step(meta, *rest, **more)

        hand.workers[0].start_step = counting
        assert hand.begin_load(PlayedRequest("two", LONG), ids) == len(LONG)
        reports = hand.settle()
        assert (reports.finished, reports.failed, reports.invalid) == ({"two"}, set(), set())
        assert hand.reported == ["two"]
        assert len(segments) > 1
        assert all(torch.equal(hand.blocks(0, g, ids[g]), before[g]) for g in range(groups))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_segment_that_fails_is_reported_with_the_load(groups: int, tmp_path: Path) -> None:
    """Chunks behind a lost chunk fail as well: by block, or as a whole, and once."""
    ids = [list(range(1, 17)), list(range(17, 33))][:groups]
    with over_disk(tmp_path, "1MiB", groups) as hand:
        hand.compute(PlayedRequest("one", LONG), ids, mark=3)
        before = hand.blocks(0, 0, ids[0])
    with over_disk(tmp_path, "64KiB", groups) as hand:
        assert hand.begin_load(PlayedRequest("two", LONG), ids) == len(LONG)
        assert hand.step().finished == set()
        for file in tmp_path.rglob("*"):  # what is not in the host tier yet is lost
            if file.is_file() and file.suffix == ".dat":
                file.write_bytes(bytes(file.stat().st_size))
        reports = hand.settle()
        assert reports.finished == {"two"}
        if groups > 1:
            assert (reports.failed, reports.invalid) == ({"two"}, set())
        else:
            assert reports.failed == set()
            first = min(ids[0].index(block) for block in reports.invalid)
            assert reports.invalid == set(ids[0][first:])
            assert torch.equal(hand.blocks(0, 0, ids[0][:first]), before[:, :first])
