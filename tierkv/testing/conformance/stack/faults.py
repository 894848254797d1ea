"""Kit, in a stack: a backend that raises, lies, forgets or is full. The engine sees misses, no exception.

The faults are put between framework and backend (:mod:`tierkv.testing.faults`); the bytes and the recovery are the
backend's own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.testing import faults
from tierkv.testing.conformance.kit import A, B, C, StackKit
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.testing.faults import LIES, Fault, Inner, VerbName

HOST_SLOTS = 16
VERBS: tuple[VerbName, ...] = ("contains", "read_into", "write", "delete")
RAISED: dict[str, Callable[[], BaseException]] = {
    "a disk's error": lambda: OSError(errno.EIO, "input/output error"),
    "a plugin's mistake": lambda: KeyError("state"),
    "our own": lambda: BackendError("the server said no"),
    "an exit": lambda: SystemExit(3),
}
OTHER = Prompt(10)
READ_FAULTS: dict[str, Fault] = {
    "short, and says so": faults.short_read(5000),
    "short, and says otherwise": faults.short_read(5000, honest=False),
    "a byte of the header": faults.corrupt(60),
    "a byte of the payload": faults.corrupt(9000, 0x10),
    "another prompt's frame": lambda batch, inner: inner([replace(request, key=OTHER.keys[0]) for request in batch]),
    "nothing, and says it is all": faults.claim_without_reading(32 * 1024),
    "no bytes": faults.claim_without_reading(0),
}


class StackFaultTests(StackKit):
    """Promises 1 and 3, with this backend below."""

    @pytest.mark.parametrize("raised", RAISED)
    def test_raising_reads_are_misses(self, place: Path, raised: str) -> None:
        """A raising plugin loses its own chunks and no others; after its recovery they are hits again."""
        self._misses_then_hits(place, faults.raise_error(RAISED[raised]))

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_raising_verb_stops_nobody(self, opened: SmallStack, verb: VerbName) -> None:
        """Whichever verb raises, stores and lookups go on, and after the recovery the same chunks can be stored."""
        opened.faulty.add(verb, faults.raise_error(RAISED["a plugin's mistake"]))
        opened.store_all(A)
        assert opened.load(A) == 4, "the host tier's own chunks"
        opened.load_cold(A)
        opened.settle()
        self._recovers(opened, A)

    def test_raising_leaves_hot_chunks_hits(self, opened: SmallStack) -> None:
        """A raising plugin once turned chunks resident in CPU memory into misses: each tier is guarded separately."""
        opened.store_all(A)
        for verb in VERBS:
            opened.faulty.add(verb, faults.raise_error(RAISED["an exit"]))
        before = len(opened.faulty.calls)
        assert opened.load(A) == 4
        assert len(opened.faulty.calls) == before, "a hit in the host tier asked the tier below"

    @pytest.mark.parametrize("verb", VERBS)
    def test_lies_are_misses(self, opened: SmallStack, verb: VerbName) -> None:
        """Too few results, other types, impossible lengths: a plugin's bug is a miss, no exception or wrong bytes."""
        opened.store_all(A)
        for lie in LIES.values():
            rule = opened.faulty.add(verb, lie)
            opened.load_cold(A)  # checks every loaded byte
            opened.store(B)
            opened.settle()
            opened.faulty.rules.remove(rule)
        self._recovers(opened, A, B)

    @pytest.mark.parametrize("fault", READ_FAULTS)
    def test_bad_reads_are_misses(self, place: Path, fault: str) -> None:
        """A short read once was a hit with stale bytes: a buffer is published only after a full verified read."""
        self._misses_then_hits(place, READ_FAULTS[fault])

    def test_a_write_that_is_not_there_is_a_miss(self, opened: SmallStack) -> None:
        """A backend that acknowledges and forgets loses a chunk once: the next store writes it."""
        opened.faulty.add("write", faults.forget())
        opened.store_all(A)
        opened.faulty.rules.clear()
        assert opened.load_cold(A) == 0
        self._recovers(opened, A)

    def test_half_a_write_is_a_miss(self, opened: SmallStack) -> None:
        """A short write that is acknowledged must not be a hit, now or after a restart."""
        opened.faulty.add("write", faults.write_half())
        opened.store_all(A)
        opened.faulty.rules.clear()
        assert opened.load_cold(A) == 0
        self._recovers(opened, A)

    def test_one_failed_key_fails_alone_in_writes(self, opened: SmallStack) -> None:
        """One bad object once failed its batch: an error for one key does not affect its neighbours."""
        opened.faulty.add("write", _fail_key(A.keys[2]))
        opened.store_all(A, B)
        opened.faulty.rules.clear()
        assert [opened.load_cold(A), opened.load_cold(B)] == [2, 4]
        self._recovers(opened, A, B)

    def test_one_failed_key_fails_alone_in_reads(self, opened: SmallStack) -> None:
        """A failed read of one key: the prefix before the failed chunk is a hit, and other prompts are."""
        opened.store_all(A, B)
        opened.faulty.add("read_into", _fail_key(A.keys[2]))
        assert [opened.load_cold(A), opened.load_cold(B)] == [2, 4]
        opened.faulty.rules.clear()
        self._recovers(opened, A, B)

    def test_failed_writes_bar_no_key_and_leak_no_slot(self, opened: SmallStack) -> None:
        """One write error once leaked its buffer and barred its key for ever: a failed store keeps nothing."""
        for round_number in range(4):
            rule = opened.faulty.add("write", faults.raise_error(RAISED["a disk's error"]))
            for number in range(4):
                opened.store(Prompt(number, 8))
            opened.settle()
            opened.faulty.rules.remove(rule)
            opened.forget_host()
            opened.settle()
            opened.step_until(opened.host_is_idle, f"the slots of failed writes, round {round_number}")
        opened.pass_time(60.0)
        opened.store_all(Prompt(0, 8))
        assert opened.load_cold(Prompt(0, 8)) == 8

    def test_a_passing_trouble_is_retried(self, place: Path) -> None:
        """A connection lost once is no reason to compute a prompt again."""
        with self.stack(place, tier={"retries": 2}) as stack:
            stack.faulty.add("write", faults.raise_error(ConnectionResetError), times=1)
            stack.store_all(A)
            stack.faulty.add("read_into", faults.raise_error(ConnectionResetError), times=1)
            assert stack.load_cold(A) == 4
            assert stack.stack.tiers.stats()[TESTED]["retries"] >= 2

    @pytest.mark.parametrize("told", ["returned", "raised", "errno"])
    def test_a_full_place_is_evicted_from(self, opened: SmallStack, told: str) -> None:
        """However a backend reports that it is full, the framework evicts, and stores go on."""
        full: dict[str, Fault] = {
            "returned": lambda batch, _: [OutOfSpaceError("full") for _ in batch],
            "raised": faults.raise_error(lambda: OutOfSpaceError("full")),
            "errno": faults.raise_error(lambda: OSError(errno.ENOSPC, "no space left on device")),
        }
        opened.store_all(A, B)
        opened.faulty.add("write", full[told], times=2)
        opened.store_all(C)
        opened.settle()
        opened.faulty.rules.clear()
        if self.capabilities.authoritative_index:
            assert opened.stack.metrics.counters.evictions[TESTED], "nothing was evicted"
        self._recovers(opened, C)

    def test_the_breaker_opens_and_heals_by_itself(self, place: Path) -> None:
        """Servers once ran without their lower tier for 45 hours after 50 seconds of outage: a breaker retries."""
        with self.stack(place, tier={"breaker_failures": 3}) as stack:
            stack.store_all(A)
            for verb in VERBS:
                stack.faulty.add(verb, faults.raise_error(RAISED["a disk's error"]))
            while not stack.stack.tiers.stats()[TESTED]["breaker_opens"]:
                stack.load_cold(A)
                stack.pass_time(30.0)
            failed = stack.stack.tiers.stats()[TESTED]["failed"]  # its trials do not count
            assert stack.load_cold(A) == 0
            assert stack.stack.tiers.stats()[TESTED]["failed"] == failed, "a tier that is out of service was asked"
            stack.faulty.rules.clear()
            stack.until_usable()
            assert stack.load_cold(A) == 4

    def test_a_scan_that_fails_costs_its_tier_alone(self, place: Path) -> None:
        """A tier that cannot list its content is unusable; the stack opens, reports it, and recovers."""
        self.need("scan", "durable")
        with self.stack(place) as stack:
            stack.store_all(A)
        bad: list[Fault] = [faults.raise_error(RAISED["a disk's error"]), faults.lie(lambda _: [object()])]
        for fault in bad:
            with self.stack(place, faults={"scan": fault}) as stack:
                assert stack.stack.tiers.stats()[TESTED]["breaker_opens"] == 1
                stack.store(B)
                assert stack.load(B) == 4, "the host tier works without it"
                stack.faulty.rules.clear()
                stack.until_usable()
                stack.store_all(C)
                assert stack.load_cold(C) == 4
        with self.stack(place) as stack:
            assert stack.load(A) == 4

    def _misses_then_hits(self, place: Path, fault: Fault) -> None:
        with self.stack(place, host_slots=HOST_SLOTS) as stack:
            stack.store_all(A)
            stack.store_all(*(Prompt(number) for number in range(10, 10 + HOST_SLOTS // 4)))  # every slot is another's
            stack.faulty.add("read_into", fault)
            assert stack.load_cold(A) == 0
            assert stack.load_cold(A) == 0
            stack.faulty.rules.clear()
            self._recovers(stack, A)

    @staticmethod
    def _recovers(stack: SmallStack, *prompts: Prompt) -> None:
        """Check a recovered backend: chunks are stored if need be, and found."""
        stack.faulty.rules.clear()
        stack.settle()
        stack.pass_time(60.0)
        stack.settle()
        stack.forget_host()
        stack.store_all(*prompts)
        assert [stack.load_cold(prompt) for prompt in prompts] == [4] * len(prompts)


def _fail_key(key: bytes) -> Fault:
    """Replace the result of one key by an error; the verb does nothing for that key."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        healthy = [request for request in batch if request.key != key]
        results = iter(inner(healthy) if healthy else [])
        return [BackendError("not this one") if request.key == key else next(results) for request in batch]

    return fault
