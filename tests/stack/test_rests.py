"""Rests: steps that only decode leave the tiers alone, until something waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierkv
from tierkv.manager.moves.tier_io import SLOTS_PER_WAITING
from tierkv.metrics.counters import CoreCounters
from tierkv.stack.opening import open_staged_stack
from tierkv.stack.remote_worker import open_worker
from tierkv.stack.rests import REST_S, REST_STEPS_MAX, Rests
from tierkv.stack.stack import Stack
from tierkv.testing.engines.hand_engine import BLOCK_TOKENS, PAYLOAD_BYTES, HandEngine, HandRequest, Prompt, engine_spec
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.keys import make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import NO_REQUEST, TransferJob

SLOTS = 4 * SLOTS_PER_WAITING
PROMPT, COMPUTED = Prompt(1, 8), 6
"""A prompt, and its chunks that are computed and written before it is decoded."""


class GeneratingRequest(HandRequest):
    """Request whose chunks behind the computed ones are generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return COMPUTED * BLOCK_TOKENS


class Decoder:
    """Engine with one request, whose next tokens are computed one in each step."""

    def __init__(self, stack: Stack, *, generates: bool = False) -> None:
        self.engine, self.stack = HandEngine(stack), stack
        self.request = GeneratingRequest("generates", PROMPT) if generates else self.engine.arrive(PROMPT)
        stack.on_new_request(self.request)
        assert self.engine.ask(self.request) == 0
        self.engine.allocate(self.request, 0)
        self.computed = COMPUTED * BLOCK_TOKENS
        self._step(ScheduledRequest(self.request.request_id, 0, self.computed, (self._table,), replaces_table=True))
        self.engine.step_until(lambda: written(stack) == COMPUTED, "the first writes")
        self.decode()  # no rest before it: that step was the first to decode only

    @property
    def _table(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.request.blocks)

    def _step(self, entry: ScheduledRequest) -> None:
        self.engine.step(StepOutput((entry,)), lambda: self.engine.compute(self.request, 0))

    def decode(self) -> None:
        """Make a step that decodes one token; what it copies has ended after it."""
        self._step(ScheduledRequest(self.request.request_id, self.computed, 1, ((),)))
        self.computed += 1
        self.stack.worker.drain()

    def complete_a_chunk(self) -> None:
        """Decode until the next chunk was computed, and its copy is reported."""
        while self.computed % BLOCK_TOKENS:
            self.decode()
        while not self.stack._scheduler._completions.has_stores:
            self.decode()

    def hold_a_chunk(self) -> None:
        """Decode until the next chunk was computed, and waits for the end of a rest."""
        while not self.stack._scheduler.holds_chunks:
            assert self.computed < PROMPT.chunks * BLOCK_TOKENS
            self.decode()


def written(stack: Stack) -> int:
    """Number of chunks that were written to the disk."""
    return stack.metrics.counters.cascades["disk"]


def config_of(place: Path, **step: int) -> dict[str, Any]:
    """Description of a roomy host tier and a disk."""
    disk = {"backend": "disk", "path": str(place / "disk"), "capacity": "64MiB", "min_free_bytes": 0}
    return {"host": {"capacity": SLOTS * (PAYLOAD_BYTES + 4096)}, "tiers": [disk], "step": step}


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """An open stack, whose rests end by their number of steps on a slow machine, too."""
    monkeypatch.setattr("tierkv.stack.rests.REST_S", 3600.0)
    with tierkv.open_stack(config_of(tmp_path), engine_spec()) as opened:
        yield opened


def drains_of(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per step that takes in what tiers have completed, from now on."""
    drained: list[int] = []
    dispatcher = stack._core.wiring.dispatcher
    drain: Callable[[int], list[Any]] = dispatcher.drain

    def counted(keys_max: int) -> list[Any]:
        drained.append(keys_max)
        return drain(keys_max)

    monkeypatch.setattr(dispatcher, "drain", counted)
    return drained


def test_most_steps_that_decode_leave_the_tiers_alone(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step is cheap only where it calls neither dispatch nor the moves between tiers: so calls are counted."""
    decoder, drained = Decoder(stack), drains_of(stack, monkeypatch)
    for _ in range(REST_STEPS_MAX):
        decoder.decode()
    assert not drained
    decoder.decode()
    assert len(drained) == 1


def test_without_steps_of_rest_every_step_takes_in_what_tiers_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator must be able to switch rests off."""
    with tierkv.open_stack(config_of(tmp_path, rest_steps_max=0), engine_spec()) as stack:
        decoder, drained = Decoder(stack), drains_of(stack, monkeypatch)
        for _ in range(3):
            decoder.decode()
        assert len(drained) == 3


def test_a_chunk_that_was_stored_in_a_rest_is_found_at_once(stack: Stack) -> None:
    """A rest must cost no hit: a question finds each chunk whose copy was reported, taken in or not."""
    decoder = Decoder(stack)
    decoder.complete_a_chunk()
    assert stack.has_pending_work()
    assert decoder.engine.ask(decoder.engine.arrive(PROMPT)) == COMPUTED + 1
    assert not stack.has_pending_work()


def test_a_chunk_that_was_stored_in_a_rest_is_written_by_itself(stack: Stack) -> None:
    """The tiers below must get what running requests complete while they run, a few steps later."""
    decoder = Decoder(stack)
    decoder.complete_a_chunk()
    for _ in range(REST_STEPS_MAX + 1):
        decoder.decode()
    assert not stack._scheduler._completions.has_stores
    decoder.engine.step_until(lambda: written(stack) == COMPUTED + 1, "the write of the chunk")


def test_a_flush_in_a_rest_writes_what_was_stored(stack: Stack) -> None:
    """A reported chunk must not be lost by a close that follows."""
    decoder = Decoder(stack)
    decoder.complete_a_chunk()
    assert stack.flush()
    assert written(stack) == COMPUTED + 1


def test_a_chunk_that_a_rest_holds_is_offered_at_its_end(stack: Stack) -> None:
    """The tiers must get it while its request runs."""
    decoder = Decoder(stack, generates=True)
    decoder.hold_a_chunk()
    for _ in range(REST_STEPS_MAX + 1):
        if stack._scheduler.holds_chunks:
            decoder.decode()
    assert not stack._scheduler.holds_chunks
    decoder.engine.step_until(lambda: written(stack) == COMPUTED + 1, "the write of the chunk")


def test_a_flush_in_a_rest_writes_what_is_held(stack: Stack) -> None:
    """A flush must write what running requests have completed, offered or not."""
    decoder = Decoder(stack, generates=True)
    decoder.hold_a_chunk()
    assert stack.flush()
    assert written(stack) == COMPUTED + 1


def test_a_close_in_a_rest_writes_what_is_held(tmp_path: Path) -> None:
    """An engine that stops must find after its restart what its running requests had completed."""
    stack = tierkv.open_stack(config_of(tmp_path), engine_spec())
    Decoder(stack, generates=True).hold_a_chunk()
    assert stack.close()
    with tierkv.open_stack(config_of(tmp_path), engine_spec()) as again:
        engine = HandEngine(again)
        request = engine.arrive(PROMPT)
        engine.step_until(lambda: engine.ask(request) is not None, "an answer")
        assert engine.ask(request) == COMPUTED + 1
        engine.end(request)


def test_a_reset_in_a_rest_forgets_what_was_stored(stack: Stack) -> None:
    """Chunks that were computed with old weights must not become readable after the reset."""
    decoder = Decoder(stack)
    decoder.complete_a_chunk()
    stack.reset_cache("all")
    assert stack.flush()
    assert decoder.engine.ask(decoder.engine.arrive(PROMPT)) == 0


def test_a_load_is_never_left_waiting(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for its load is in no rest, however many others decode."""
    decoder = Decoder(stack)
    request = decoder.engine.arrive(PROMPT.first(COMPUTED))
    assert decoder.engine.ask(request) == COMPUTED
    decoder.engine.allocate(request, COMPUTED)
    drained = drains_of(stack, monkeypatch)
    decoder.decode()
    decoder.decode()
    assert len(drained) == 1  # the first one was begun by the question
    decoder.engine.end(request)


class Waits:
    """Conditions of a rest, set by hand."""

    def __init__(self, slots: int = SLOTS, steps_max: int = REST_STEPS_MAX) -> None:
        self.clock, self.counters, self.filling, self.nothing = ManualClock(), CoreCounters(), set[int](), True
        self.changes: list[str] = []
        self.rests = Rests(
            lambda: self.nothing, self.counters, self.changes, self.filling, slots, self.clock, steps_max
        )
        self.rests.step_ended()


def test_a_rest_ends_after_a_quarter_of_a_second() -> None:
    """An engine whose steps are slow must not keep tiers waiting for seconds."""
    waits = Waits()
    assert waits.rests.take_step()
    waits.clock.advance(REST_S)
    assert not waits.rests.take_step()
    assert not waits.rests.left


def test_a_rest_ends_when_a_store_finds_no_room() -> None:
    """The slots that it lacks may be those of writes that have ended."""
    waits = Waits()
    waits.counters.stores_refused += 1
    assert not waits.rests.take_step()


def test_a_rest_ends_when_many_chunks_wait() -> None:
    """They keep slots: what a small host tier stores is soon evicted, and must be written before."""
    waits = Waits()
    waits.filling.update(range(SLOTS // SLOTS_PER_WAITING))
    assert waits.rests.take_step()
    waits.filling.add(SLOTS)
    assert not waits.rests.take_step()


def test_a_rest_ends_when_a_tier_is_attached_or_detached() -> None:
    """A tier that was detached must get nothing from the next step on."""
    waits = Waits()
    waits.changes.append("detach the disk")
    assert not waits.rests.take_step()


def test_no_rest_begins_while_something_waits() -> None:
    """A request that waits for a tier must be served by every step."""
    waits = Waits()
    waits.rests.left, waits.nothing = 0, False
    waits.rests.step_ended()
    assert not waits.rests.take_step()


@pytest.mark.parametrize("asks", [True, False])
def test_a_staged_store_that_ended_in_a_rest_is_neither_lost_nor_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """An engine that schedules itself relies on it, too: a question finds the chunk, and a flush writes it."""
    monkeypatch.setattr("tierkv.stack.rests.REST_S", 3600.0)
    with open_staged_stack(config_of(tmp_path), engine_spec()) as stack:
        worker = open_worker(stack.worker_setup(0))
        worker.register_kv_caches([[np.ones((2, PAYLOAD_BYTES), np.uint8)]])
        stack.on_new_request("a")
        for _ in range(2):
            stack.end_step()
        store = stack.prepare_store("a", [(make_key(b"chunk", 0), BLOCK_TOKENS)])
        assert store is not None
        transfer = store.transfer
        worker.start(
            TransferJob(1, NO_REQUEST, True, transfer.keys, transfer.slots, transfer.groups, (1,), (1,), (0,))
        )  # fmt: skip
        worker.drain()
        worker.mark_ended(transfer.number)
        stack.complete_store(transfer.keys)
        assert not stack.metrics.counters.chunks_stored
        assert stack.has_pending_work()
        if asks:
            assert stack.lookup("b", transfer.keys[0], BLOCK_TOKENS) is LookupResult.HIT
        assert stack.flush()
        assert stack.metrics.counters.cascades["disk"] == 1
        worker.close()
