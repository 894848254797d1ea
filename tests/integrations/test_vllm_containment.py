"""Errors of tierkv inside vLLM's calls: the engine goes on, and each load that vLLM waits for is reported once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_by_hand import BLOCK_TOKENS, ByHand, PlayedRequest, blocks_of, scheduler_output  # noqa: E402 - needs torch

from tierkv.integrations.vllm.refusals import contains_errors  # noqa: E402 - (the same)

pytestmark = pytest.mark.needs_torch

HOST = {"host": {"capacity": "1MiB"}, "lookup": {"recompute": "off"}}
PROMPT = list(range(4 * BLOCK_TOKENS))
OTHER = [token + 500 for token in PROMPT]
FIRST, SECOND, THIRD = [[1, 2, 3, 4]], [[11, 12, 13, 14]], [[21, 22, 23, 24]]

DROPS = ("on_new_request", "get_num_new_matched_tokens", "request_finished")
STOPS = ("update_state_after_alloc", "build", "process_output", "has_pending_work")
OF_WORKER = ("start_step", "queue_stores", "take_results")


class BrokenCallError(Exception):
    """An error that nothing of tierkv raises."""


def break_call(target: Any, name: str, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a method, or a property, of an object's class raise: before it does anything, or after it has done all."""
    kind = type(target)
    original = vars(kind)[name]

    def run(self: Any, *arguments: Any, **keywords: Any) -> None:
        if after and isinstance(original, property):
            original.fget(self)  # type: ignore[misc]
        elif after:
            original(self, *arguments, **keywords)
        raise BrokenCallError(f"in {name}")

    monkeypatch.setattr(kind, name, property(run) if isinstance(original, property) else run)


def counted(hand: ByHand) -> int:
    """Number of contained errors."""
    return int(hand.scheduler.stack.metrics.counters.errors_contained)


def goes_on(hand: ByHand, before: list[torch.Tensor]) -> None:
    """A request for what is stored, and one for something new, come to their end with right blocks."""
    known, new = PlayedRequest("known", PROMPT), PlayedRequest("new", OTHER)
    tokens = hand.begin_load(known, SECOND)
    reports = hand.settle()
    assert hand.reported.count("known") == bool(tokens), "vLLM waits for one report, and accepts no second one"
    if tokens and "known" not in reports.failed:
        assert all(torch.equal(hand.blocks(rank, 0, SECOND[0]), part) for rank, part in enumerate(before))
    hand.scheduler.request_finished(known, tuple(SECOND))
    hand.scheduler.on_new_request(new)
    assert hand.scheduler.get_num_new_matched_tokens(new, 0) in {(0, False), (None, False)}
    hand.scheduler.update_state_after_alloc(new, blocks_of(THIRD), 0)
    hand.step(scheduler_output([(new, 0, THIRD)]), lambda: hand.fill(THIRD, 5))
    hand.scheduler.request_finished(new, tuple(THIRD))
    hand.settle()
    assert hand.scheduler.reset_cache()
    assert not hand.scheduler.has_pending_work


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [*DROPS, *STOPS])
def test_an_error_of_the_scheduler_side(
    name: str, after: bool, ranks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it happens before anything was changed, or when all of it was."""
    with ByHand(HOST, ranks=ranks, contains=True) as hand:
        hand.compute(PlayedRequest("one", PROMPT), FIRST, mark=3)
        before = [hand.blocks(rank, 0, FIRST[0]) for rank in range(ranks)]
        break_call(hand.scheduler.inner, name, after=after, monkeypatch=monkeypatch)
        goes_on(hand, before)
        assert counted(hand) >= 1
        if name in DROPS:
            assert hand.scheduler.stack.metrics.counters.requests_dropped >= 1
        monkeypatch.undo()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


@pytest.mark.parametrize(
    ("name", "after"),
    [(name, after) for name in OF_WORKER for after in (False, True) if not (after and name == "take_results")],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_one_worker(name: str, after: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others and the scheduler's side stop with it, and no load stays without a report.

    Results that were collected are returned at once: no error can come after that."""
    with ByHand(HOST, ranks=ranks, contains=True) as hand:
        hand.compute(PlayedRequest("one", PROMPT), FIRST, mark=3)
        before = [hand.blocks(rank, 0, FIRST[0]) for rank in range(ranks)]
        broken = hand.workers[-1].inner
        broken.__class__ = type("Broken", (type(broken),), {name: vars(type(broken))[name]})
        break_call(broken, name, after=after, monkeypatch=monkeypatch)
        goes_on(hand, before)
        assert counted(hand) == 1
        assert hand.scheduler.get_num_new_matched_tokens(PlayedRequest("later", PROMPT), 0) == (0, False)


def test_a_load_in_flight_at_a_stop_is_reported_once() -> None:
    """Its copies may have ended already: the worker knows, and the scheduler's side does not."""
    with ByHand(HOST, contains=True) as hand:
        hand.compute(PlayedRequest("one", PROMPT), FIRST, mark=3)
        sent, unsent = PlayedRequest("sent", PROMPT), PlayedRequest("unsent", PROMPT)
        assert hand.begin_load(sent, SECOND) == len(PROMPT)
        meta, _, _ = hand.start()
        assert [job.request_id for job in meta.loads] == ["sent"]
        hand.begin_load(unsent, THIRD)
        hand.scheduler.errors.stop(BrokenCallError("somewhere"))
        reports = hand.settle()
        assert sorted(hand.reported) == ["sent", "unsent"]
        assert "unsent" in reports.failed
        assert not hand.scheduler.has_pending_work


def test_a_load_in_flight_at_a_reset_after_a_stop_fails() -> None:
    """Its data is that of old weights, also where the worker has reported it already."""
    with ByHand(HOST, contains=True) as hand:
        hand.compute(PlayedRequest("one", PROMPT), FIRST, mark=3)
        hand.begin_load(PlayedRequest("two", PROMPT), SECOND)
        hand.start()
        hand.workers[0].drain()
        collected = hand.collect()
        assert collected[2].finished == {"two"}
        hand.scheduler.errors.stop(BrokenCallError("somewhere"))
        assert hand.scheduler.reset_cache()
        hand.scheduler.process_output(collected[0], collected[1], collected[2].finished)
        assert collected[2].finished == set()
        assert hand.settle().failed == {"two"}


def test_with_validation_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of an engine must not pass because tierkv has stopped."""
    monkeypatch.setenv("TIERKV_VALIDATE", "1")
    assert not contains_errors()
    monkeypatch.setenv("TIERKV_VALIDATE", "0")
    assert contains_errors()
    with ByHand(HOST, contains=False) as hand:
        hand.compute(PlayedRequest("one", PROMPT), FIRST, mark=3)
        break_call(hand.scheduler.inner, "build", after=False, monkeypatch=monkeypatch)
        with pytest.raises(BrokenCallError):
            hand.step()
        monkeypatch.undo()
