"""Kit, in a stack: the capacity as an invariant, and the cost of an eviction."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierkv.abc import WriteRequest
from tierkv.testing.conformance.kit import StackKit
from tierkv.testing.engines.hand_engine import SLOT_BYTES, Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.testing.faults import Inner
from tierkv.types.keys import Key

CHUNKS = 8


class Meter:
    """Bytes at rest, by acknowledged writes and deletions, with maximum and minimum.

    at_rest: what an earlier meter of the place knew. What a backend tells at open is not asked: it is under test.
    """

    def __init__(self, stack: SmallStack, at_rest: Mapping[Key, int]) -> None:
        self.most_bytes = 0
        self.least_bytes = 1 << 62
        self.at_rest = dict(at_rest)
        self._lock = threading.Lock()
        stack.faulty.add("write", self._write)
        stack.faulty.add("delete", self._delete)

    @property
    def bytes(self) -> int:
        """Current bytes at rest."""
        return sum(self.at_rest.values())

    def _write(self, batch: Sequence[WriteRequest], inner: Inner) -> object:
        with self._lock:  # counted before it is there: a capacity that is exceeded for a moment is exceeded
            self.at_rest |= {request.key: len(request.frame) for request in batch}
            self.most_bytes = max(self.most_bytes, self.bytes)
        results = inner(batch)
        with self._lock:
            for request, result in zip(batch, results, strict=True):
                if result is not None:
                    self.at_rest.pop(request.key, None)
        return results

    def _delete(self, batch: Sequence[Key], inner: Inner) -> object:
        results = inner(batch)
        with self._lock:
            for key in batch:
                self.at_rest.pop(key, None)
            self.least_bytes = min(self.least_bytes, self.bytes)
        return results


class StackRoomTests(StackKit):
    """Only for tiers whose usage the framework counts: ``bounded`` with an ``authoritative_index``."""

    def test_the_capacity_is_never_exceeded(self, place: Path) -> None:
        """``remove()`` once never freed capacity, and 14 TB were stored of 4 TB: an invariant, also after restarts."""
        at_rest: dict[Key, int] = {}
        for opening in range(3 if self.capabilities.durable else 1):
            with self._full_stack(place) as stack:
                meter = Meter(stack, at_rest)
                self._churn(stack, opening, 2 * self._prompts)
                assert meter.most_bytes <= self.full_capacity_bytes
                assert meter.bytes >= self.full_capacity_bytes // 3, "far less is kept than there is room for"
                last = Prompt(1000 * opening + 2 * self._prompts - 1, CHUNKS)
                assert stack.load_cold(last) == CHUNKS
                stack.settle()
            at_rest = meter.at_rest

    def test_usage_is_known_before_the_first_store(self, place: Path) -> None:
        """Usage was once 0 after a restart, and exceeded the capacity: stored frames count before the first store."""
        self.need("durable")
        with self._full_stack(place) as stack:
            first = Meter(stack, {})
            self._churn(stack, 0, 2 * self._prompts)
        with self._full_stack(place) as stack:
            assert stack.stack.introspection.tiers()[TESTED].used_bytes == first.bytes > 0
            meter = Meter(stack, first.at_rest)
            self._churn(stack, 1, 4)
            assert meter.most_bytes <= self.full_capacity_bytes

    def test_a_smaller_capacity_is_kept_too(self, place: Path) -> None:
        """A user who halves ``capacity`` gets the other half back, at open or chunk by chunk."""
        self.need("durable")
        with self._full_stack(place) as stack:
            first = Meter(stack, {})
            self._churn(stack, 0, 2 * self._prompts)
        half = self.full_capacity_bytes // 2
        with self.stack(place, capacity_bytes=half) as stack:
            keys = list(first.at_rest)
            batches = [keys[i : i + 8] for i in range(0, len(keys), 8)]
            there = [has for batch in batches for has in stack.verbs.has(batch)]
            kept = {key: first.at_rest[key] for key, has in zip(keys, there, strict=True) if has}
            meter = Meter(stack, kept)
            self._churn(stack, 1, 4)
            assert meter.bytes <= half
            assert stack.load_cold(Prompt(1003, CHUNKS)) == CHUNKS

    def test_an_eviction_takes_what_is_needed(self, place: Path) -> None:
        """A store into a full tier once took 20 ms for a walk over all entries: evictions cost only their victims."""
        with self._full_stack(place) as stack:
            meter = Meter(stack, {})
            self._churn(stack, 0, 2 * self._prompts)
            meter.least_bytes = meter.bytes
            stack.faulty.calls.clear()
            self._churn(stack, 1, self._prompts)
            room_bytes = getattr(stack.faulty, "room_bytes", self.full_capacity_bytes)
            assert meter.least_bytes >= room_bytes // 2, "far more was evicted than was needed"
            assert "scan" not in stack.faulty.calls, "the index was read again"
            assert "contains" not in stack.faulty.calls, "a tier with an authoritative index was asked for existence"

    def _full_stack(self, place: Path) -> SmallStack:
        self.need("bounded", "authoritative_index")
        return self.stack(place, capacity_bytes=self.full_capacity_bytes)

    @property
    def _prompts(self) -> int:
        """Number of prompts that fill the tier once."""
        return self.full_capacity_bytes // (CHUNKS * SLOT_BYTES)

    @staticmethod
    def _churn(stack: SmallStack, series: int, prompts: int) -> None:
        for number in range(prompts):
            stack.store_all(Prompt(1000 * series + number, CHUNKS))
        assert stack.stack.metrics.counters.cascades[TESTED]
