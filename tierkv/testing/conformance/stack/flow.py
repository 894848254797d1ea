"""Kit, in a stack: calls of the backend and their number, and that every lookup is answered."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierkv.testing.conformance.kit import A, B, StackKit
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.testing.faults import Inner
from tierkv.types.keys import Key


class Observer:
    """Fault that only notes batches and calls at once."""

    def __init__(self) -> None:
        self.keys: Counter[Key] = Counter()
        self.batch_most = 0
        self.at_once_most = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def __call__(self, batch: Sequence[Any], inner: Inner) -> object:
        """Note a batch, and do the work."""
        with self._lock:
            self._at_once += 1
            self.at_once_most = max(self.at_once_most, self._at_once)
            self.batch_most = max(self.batch_most, len(batch))
            self.keys.update(getattr(item, "key", item) for item in batch)
        try:
            return inner(batch)
        finally:
            with self._lock:
                self._at_once -= 1


class StackFlowTests(StackKit):
    """Effects of the declared capabilities."""

    def test_a_hot_hit_is_answered_at_once(self, opened: SmallStack) -> None:
        """A key in CPU memory once cost a deferral and 200 microseconds: here the backend is not called."""
        opened.store_all(A)
        opened.faulty.calls.clear()
        request = opened.arrive(A)
        assert opened.ask(request) == 4
        assert opened.load_for(request, 4) == 4
        opened.end(request)
        assert opened.faulty.calls == []

    def test_a_prefix_longer_than_the_host_tier_resolves(self, place: Path) -> None:
        """A prefix one chunk longer than the CPU tier was once deferred for ever: here it is loaded, read once."""
        self.need("durable")
        long = Prompt(1, 24)
        with self.stack(place, host_slots=40) as stack:
            for chunks in range(4, 25, 4):
                stack.store_all(long.first(chunks))
        with self.stack(place, host_slots=8) as stack:
            assert stack.load_within_deadline(long) == 24
            assert stack.stack.metrics.counters.promotions[TESTED] == 24

    def test_batches_and_calls_keep_to_the_declaration(self, opened: SmallStack) -> None:
        """A backend sizes its connections by its declaration: neither batches nor calls at once exceed it."""
        observers = [Observer() for _ in range(3)]
        for verb, observer in zip(("read_into", "write", "delete"), observers, strict=True):
            opened.faulty.add(verb, observer)  # type: ignore[arg-type]  # mypy loses the literal in the tuple
        prompts = [Prompt(number, 8) for number in range(6)]
        for first, second in zip(prompts[::2], prompts[1::2], strict=True):  # what has room in the host tier at once
            opened.store_all(first, second)
        for prompt in prompts:
            assert opened.load_cold(prompt) == 8
        assert max(observer.batch_most for observer in observers) <= self.capabilities.preferred_batch
        assert max(observer.at_once_most for observer in observers) <= self.capabilities.preferred_concurrency

    def test_two_requests_read_a_chunk_once(self, opened: SmallStack) -> None:
        """Two requests with one system prompt arrive together: its chunks are read once, and both load them."""
        opened.store_all(A)
        opened.forget_host()
        observer = Observer()
        opened.faulty.add("read_into", observer)
        first, second = opened.arrive(A), opened.arrive(A)
        answers: dict[str, int | None] = {}

        def answered() -> bool:
            for request in (first, second):
                if answers.get(request.request_id) is None:
                    answers[request.request_id] = opened.ask(request)
            return None not in answers.values()

        opened.step_until(answered, "answers to both")
        assert list(answers.values()) == [4, 4]
        assert [opened.load_for(request, 4) for request in (first, second)] == [4, 4]
        for request in (first, second):
            opened.end(request)
        assert set(observer.keys.values()) == {1}, "a chunk was read twice"

    def test_what_is_stored_is_not_written_again(self, opened: SmallStack) -> None:
        """A prompt that is repeated every minute is stored already: its chunks are not uploaded each time."""
        opened.store_all(A)
        observer = Observer()
        opened.faulty.add("write", observer)
        for _ in range(3):
            opened.forget_host()
            opened.store_all(A, B)
        assert not set(A.keys) & set(observer.keys), "written again"
        assert set(observer.keys.values()) == {1}

    def test_an_answer_is_remembered(self, opened: SmallStack) -> None:
        """Answers of a shared tier are cached: a waiting request does not probe it in every step."""
        self.need("shared")
        opened.store_all(A)
        opened.forget_host()
        opened.pass_time(3600.0)
        observer = Observer()
        opened.faulty.add("contains", observer)
        for _ in range(3):
            assert opened.load_cold(A) == 4
            opened.pass_time(5.0)
        assert set(observer.keys.values()) == {1}, "asked again"
