"""Kit, in a stack: a backend that hangs. No call waits for it, its buffers stay unused, and it may recover.

Time is constant unless a test moves it: "within the deadline" refers to the stack's clock.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tierkv.testing.conformance.kit import A, B, C, StackKit
from tierkv.testing.engines.hand_engine import SLOT_BYTES, Prompt
from tierkv.testing.engines.small_stack import READ_DEADLINE_S, SECOND, TESTED, WRITE_DEADLINE_S, SmallStack
from tierkv.testing.faults import VerbName, hang_until

VERBS: tuple[VerbName, ...] = ("contains", "read_into", "write", "delete")


class StackWedgedTests(StackKit):
    """Promises 2, 4 and 6, with this backend below."""

    def test_wedged_reads_end_as_misses(self, opened: SmallStack) -> None:
        """A deferred lookup resolves within its deadline, also with the tier hung; then the prompt is computed."""
        opened.store_all(A)
        opened.forget_host()
        opened.wedge("read_into")
        assert opened.load_within_deadline(A) == 0
        self._comes_back(opened, A)

    def test_wedged_probes_end_as_misses(self, opened: SmallStack) -> None:
        """A shared tier must be probed first: a probe that hangs may defer a request, but not for ever."""
        self.need("shared")
        opened.store_all(A)
        opened.forget_host()
        opened.pass_time(3600.0)  # earlier answers have expired
        opened.wedge("contains")
        assert opened.load_within_deadline(A) == 0
        assert opened.load_within_deadline(B) == 0
        self._comes_back(opened, A)

    @pytest.mark.parametrize("second_first", [False, True])
    def test_a_wedged_tier_hides_no_other(self, place: Path, *, second_first: bool) -> None:
        """A hanging plugin once left 20 of 20 other lookups unanswered: chunks of another tier are still hits."""
        with self.stack(place, second=True, second_first=second_first) as stack:
            stack.store_all(A, B)
            stack.forget_host()
            stack.wedge(*VERBS)
            assert [stack.load_within_deadline(A), stack.load_within_deadline(B)] == [4, 4]
            assert stack.stack.metrics.counters.promotions[SECOND] == 8
            stack.store(C)
            stack.forget_host()
            stack.step_until(
                lambda: stack.stack.metrics.counters.cascades[SECOND] == 12, "the other tier to be written"
            )
            assert stack.load_within_deadline(C) == 4

    def test_wedged_writes_do_not_stop_stores(self, opened: SmallStack) -> None:
        """Stores end in the host tier: a hung tier holds a bounded number of slots, and drops are counted."""
        opened.wedge("write")
        for number in range(20):
            opened.store(Prompt(number))
        assert opened.load(Prompt(19)) == 4, "the newest prompt is not even in the host tier"
        opened.release()
        opened.settle()
        assert opened.stack.metrics.counters.cascades_dropped[TESTED]
        self._comes_back(opened, A)

    def test_wedged_deletes_do_not_stop_stores(self, place: Path) -> None:
        """A full tier that cannot delete stores no more; the host tier does, and no capacity is exceeded."""
        self.need("authoritative_index", "bounded")
        with self.stack(place, capacity_bytes=self.full_capacity_bytes) as stack:
            stack.wedge("delete")
            prompts = [Prompt(number, 8) for number in range(self.full_capacity_bytes // (8 * SLOT_BYTES) + 8)]
            for prompt in prompts:
                stack.store(prompt)
                stack.pass_time(1.0)
                tier = stack.stack.introspection.tiers()[TESTED]
                assert tier.used_bytes + tier.reserved_bytes <= self.full_capacity_bytes
            assert "delete" in stack.faulty.calls
            assert stack.load(prompts[-1]) == 8

    def test_a_late_read_touches_no_other_chunk(self, place: Path) -> None:
        """An expired lease once gave a live buffer to another writer: a slot is free when its I/O has truly ended."""
        newer = [Prompt(number) for number in range(10, 14)]
        with self.stack(place, host_slots=16) as stack:
            stack.store_all(A)
            stack.forget_host()
            stack.wedge("read_into")
            assert stack.load_within_deadline(A) == 0
            for prompt in newer:  # more than has room beside the slots that are still read into
                stack.store(prompt)
            hot = [prompt for prompt in newer if stack.stack.introspection.in_host(prompt.keys) == set(prompt.keys)]
            assert newer[-1] in hot
            stack.release()  # the late read fills its slots now
            stack.step_until(lambda: not stack.pending, "the late read to end")
            assert [stack.load(prompt) for prompt in hot] == [4] * len(hot), "a late read hit another chunk's slot"
            stack.settle()
            stack.step_until(stack.host_is_idle, "the late read's slots")

    def test_a_late_write_is_not_believed(self, opened: SmallStack) -> None:
        """A write that missed its deadline may have happened or not: every key in the index must be stored."""
        opened.wedge("write")
        opened.store(A)
        opened.pass_time(WRITE_DEADLINE_S + 1.0)
        opened.release()
        opened.settle()
        known = list(opened.stack.introspection.in_index(TESTED, A.keys))
        assert opened.verbs.has(known) == [True] * len(known) if known else True
        assert opened.load_cold(A) in {0, 4}
        self._comes_back(opened, A)

    def test_a_wedged_tier_is_soon_left_alone(self, place: Path) -> None:
        """Status was healthy while a plugin hung: a breaker opens, reports it, and lookups skip the tier."""
        with self.stack(place, tier={"breaker_failures": 2}) as stack:
            stack.store_all(A, B, C)
            stack.forget_host()
            stack.wedge(*VERBS)
            for prompt in (A, B, C):
                stack.load_within_deadline(prompt)
                stack.pass_time(READ_DEADLINE_S)
            assert stack.stack.tiers.stats()[TESTED]["breaker_opens"] >= 1
            request = stack.arrive(A)
            assert stack.ask(request) == 0, "a lookup is deferred for a tier that is out of service"
            stack.end(request)
            stack.release()
            stack.step_until(lambda: not stack.pending, "the hanging calls to end")
            stack.until_usable()
            self._comes_back(stack, A)

    def test_close_does_not_wait_for_a_wedged_backend(self, place: Path) -> None:
        """A server must be able to stop: close abandons hanging calls within its bound, and returns False."""
        stack = self.stack(place)
        try:
            stack.store_all(A)
            stack.forget_host()
            stack.wedge(*VERBS, "close")
            stack.load_within_deadline(A)
            stack.store(B)
            assert not stack.stack.close(timeout_s=0.05), "said that all was written"
        finally:
            stack.release()
            stack.close()
            stack.close_inner()

    def test_a_wedged_scan_does_not_stop_the_opening(self, place: Path) -> None:
        """A mount that hung once stopped the server from starting: the stack opens without that tier's index."""
        self.need("scan")
        released = threading.Event()
        try:
            with self.stack(place, faults={"scan": hang_until(released)}, pace=1000.0) as stack:
                assert stack.stack.tiers.stats()[TESTED]["breaker_opens"] == 1
                stack.store(A)
                assert stack.load(A) == 4
                released.set()
        finally:
            released.set()

    @staticmethod
    def _comes_back(stack: SmallStack, *prompts: Prompt) -> None:
        """Hanging calls have ended: everything is at rest, chunks are stored if need be, and found."""
        stack.release()
        stack.settle()
        stack.pass_time(60.0)
        stack.settle()
        stack.forget_host()
        stack.store_all(*prompts)
        assert [stack.load_cold(prompt) for prompt in prompts] == [4] * len(prompts)
