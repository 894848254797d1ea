"""Calls of vLLM that break a rule: the request goes on without tierkv, and so does the engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from vllm_by_hand import BLOCK_TOKENS, ByHand, PlayedBlock, PlayedRequest, scheduler_output

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.refusals import KINDS_MAX, Refusals
from tierkv.types.transfers import WorkerOutput

pytestmark = pytest.mark.needs_torch

HOST = {"host": {"capacity": "1MiB"}, "lookup": {"recompute": "off"}}
PROMPT = list(range(4 * BLOCK_TOKENS))
GOOD, BAD = [[1, 2, 3, 4]], [[5, 6, 7, 8]]


def dropped(hand: ByHand) -> Any:
    """Number of requests that were dropped."""
    return hand.scheduler.stack.metrics.counters.requests_dropped


def goes_on(hand: ByHand, bad: PlayedRequest) -> None:
    """The bad request runs and ends, its chunks are not stored, and another request is served."""
    other = [token + 1000 for token in PROMPT]
    stored = hand.scheduler.stack.metrics.counters.chunks_stored
    assert hand.scheduler.get_num_new_matched_tokens(bad, 0) == (0, False)
    hand.scheduler.update_state_after_alloc(bad, [[PlayedBlock(i) for i in BAD[0]]], 0)
    hand.step(scheduler_output(new=[(bad, 0, BAD)]))
    hand.scheduler.request_finished(bad, ())
    hand.settle()
    assert hand.scheduler.stack.metrics.counters.chunks_stored == stored
    hand.compute(PlayedRequest("good", other), GOOD, mark=3)
    assert hand.begin_load(PlayedRequest("again", other), [[9, 10, 11, 12]]) == len(other)
    assert hand.settle().finished == {"again"}
    assert not hand.scheduler.has_pending_work


@pytest.mark.parametrize(
    "hashes",
    [
        pytest.param([b"one", b"", b"three", b"four"], id="empty"),
        pytest.param([1, 2, 3, 4], id="integer"),
        pytest.param([b"one", b"one", b"one", b"one"], id="repeated"),
    ],
)
@pytest.mark.parametrize("when", ["at arrival", "at a question", "in a step", "at its end"])
def test_bad_hashes(hashes: list[Any], when: str, caplog: pytest.LogCaptureFixture) -> None:
    """An engine with another hash function must serve as without tierkv."""
    with ByHand(HOST) as hand:
        bad = PlayedRequest("bad", PROMPT)
        good = bad.block_hashes
        bad.block_hashes = hashes if when == "at arrival" else []
        hand.scheduler.on_new_request(bad)
        if when == "at a question":
            bad.block_hashes = hashes
            assert hand.scheduler.get_num_new_matched_tokens(bad, 0) == (0, False)
        elif when in {"in a step", "at its end"}:
            bad.block_hashes = hashes if when == "in a step" else []
            hand.step(scheduler_output(new=[(bad, 0, BAD)]))
        if when == "at its end":
            bad.block_hashes = hashes
            hand.scheduler.request_finished(bad, ())
        assert dropped(hand) == 1
        goes_on(hand, bad)
        bad.block_hashes = good
    assert sum("'bad'" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[5, 6]], id="short"),
        pytest.param([[5, 6, 7, 8], [9]], id="groups"),
        pytest.param([[5, 6, 7, -8]], id="negative"),
        pytest.param([[5, 6, 7, "eight"]], id="no number"),
    ],
)
def test_block_tables_that_do_not_fit(ids: list[list[Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Others in the same step are served, and transfers on the blocks that are named all the same are flushed."""
    with ByHand(HOST) as hand:
        hand.compute(PlayedRequest("first", PROMPT), GOOD, mark=3)
        source = PlayedRequest("source", [token + 500 for token in PROMPT])
        hand.scheduler.on_new_request(source)
        hand.step(scheduler_output(new=[(source, 0, BAD)]))
        hand.scheduler.request_finished(source, ())
        bad = PlayedRequest("bad", PROMPT)
        beside = PlayedRequest("beside", [token + 2000 for token in PROMPT])
        for request in (bad, beside):
            hand.scheduler.on_new_request(request)
        made = hand.scheduler.build(scheduler_output(new=[(bad, 0, ids), (beside, 0, [[9, 10, 11, 12]])]))
        assert len(made.meta.stores) == 1
        assert made.meta.jobs_to_flush  # the store of the source still reads block 5
        assert dropped(hand) == 1
        for worker in hand.workers:
            worker.start_step(made.meta, made.setup, made.failed_loads, None)
            worker.queue_stores(made.meta)
        hand.take_reports()
        for request in (bad, beside):
            hand.scheduler.request_finished(request, ())
        hand.settle()
        goes_on(hand, PlayedRequest("unknown", PROMPT))
    assert sum("'bad'" in record.getMessage() for record in caplog.records) == 1


def test_an_allocation_that_was_not_offered() -> None:
    """VLLM waits for such a load, so it is reported as failed, and the request is computed."""
    with ByHand(HOST) as hand:
        bad = PlayedRequest("bad", PROMPT)
        hand.scheduler.on_new_request(bad)
        hand.scheduler.update_state_after_alloc(bad, [[PlayedBlock(i) for i in BAD[0]]], len(PROMPT))
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"bad"}, {"bad"})
        assert dropped(hand) == 1
        goes_on(hand, bad)


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_live_id_with_another_prompt(*, is_loading: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Neither of the two is served from now on. A load that was begun for the first one does not count."""
    with ByHand(HOST) as hand:
        hand.compute(PlayedRequest("first", PROMPT), GOOD, mark=3)
        live = PlayedRequest("bad", PROMPT)
        if is_loading:
            assert hand.begin_load(live, BAD) == len(PROMPT)
            hand.start()
        else:
            hand.scheduler.on_new_request(live)
        other = PlayedRequest("bad", [token + 500 for token in PROMPT])
        hand.scheduler.on_new_request(other)
        assert dropped(hand) == 1
        reports = hand.settle()
        assert reports.finished == reports.failed == ({"bad"} if is_loading else set())
        goes_on(hand, other)
    assert sum("another prompt" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("ids", [[[0, 0, 0, 0]], [[5, 6, 7, 0]]])
def test_null_blocks_for_a_hit(ids: list[list[int]]) -> None:
    """VLLM waits for this load, too."""
    with ByHand(HOST) as hand:
        hand.compute(PlayedRequest("first", PROMPT), GOOD, mark=3)
        bad = PlayedRequest("bad", PROMPT)
        hand.scheduler.on_new_request(bad)
        assert hand.ask(bad) == len(PROMPT)
        table = [[PlayedBlock(i, is_null=not i) for i in group] for group in ids]
        hand.scheduler.update_state_after_alloc(bad, table, len(PROMPT))
        reports = hand.settle()
        assert (reports.finished, reports.failed) == ({"bad"}, {"bad"})
        assert dropped(hand) == 1


def test_a_report_of_a_worker_that_does_not_exist(caplog: pytest.LogCaptureFixture) -> None:
    """It is about no request: it is logged and ignored."""
    with ByHand(HOST) as hand:
        source = PlayedRequest("source", PROMPT)
        hand.scheduler.on_new_request(source)
        (job,) = hand.scheduler.build(scheduler_output(new=[(source, 0, GOOD)])).meta.stores
        hand.scheduler.process_output(WorkerOutput({job.job_id: 1}, parts={job.job_id: {7: (b"",)}}), 0, None)
        hand.scheduler.process_output(WorkerOutput({job.job_id: 1}), 0, None)
        hand.settle()  # the report waits until a rest of the stack ends
        assert not hand.scheduler.stack.has_pending_work()
    assert sum("7" in record.getMessage() for record in caplog.records) == 1


def test_requests_that_tierkv_does_not_know_run_as_without_it() -> None:
    """Sessions with streamed input are such requests."""
    with ByHand(HOST) as hand:
        goes_on(hand, PlayedRequest("unknown", PROMPT))


def test_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A fault of every request must not fill the log."""
    refusals = Refusals()
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            refusals.log(EngineProtocolError(f"request 'r{number}': block_hashes[{number}] is b'': give bytes"))
            refusals.log(EngineProtocolError(f"request 'r{number}' was scheduled twice"))
        assert len(caplog.records) == 2
        for number in range(2 * KINDS_MAX):
            refusals.log(EngineProtocolError("x" * number))
    assert len(caplog.records) == KINDS_MAX


def test_the_step_of_a_refused_request_keeps_its_blocks() -> None:
    """A request that is named twice in a step writes to the blocks of both entries."""
    with ByHand(HOST) as hand:
        bad = PlayedRequest("bad", PROMPT)
        hand.scheduler.on_new_request(bad)
        output = scheduler_output(new=[(bad, 0, BAD), (bad, 0, GOOD)])
        assert isinstance(output, SimpleNamespace)
        hand.step(output)
        assert dropped(hand) == 1
