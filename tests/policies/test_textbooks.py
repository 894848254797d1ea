"""Every policy against its textbook: the same victims for the same history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from naive_policies import NaiveArc, NaiveLfu, NaiveLru, NaivePolicy, NaiveS3Fifo

from tierkv.abc import EvictionPolicy, WriteAwarePolicy
from tierkv.policies.arc import ArcPolicy
from tierkv.policies.lfu import LfuPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.s3_fifo import S3FifoPolicy
from tierkv.types.keys import Key, make_key

EXPECTED = 4
HANDLES = 12


class Ordering(EvictionPolicy, WriteAwarePolicy, Protocol):
    """Interface of all of tierkv's own policies."""


LOOKS_MAX = 5
KEYS = [make_key(b"key%d" % number, 0) for number in range(20)]

PAIRS: dict[str, tuple[Callable[[], Ordering], Callable[[], NaivePolicy]]] = {
    "arc": (lambda: ArcPolicy(EXPECTED), lambda: NaiveArc(EXPECTED)),
    "lfu": (lambda: LfuPolicy(EXPECTED), lambda: NaiveLfu(EXPECTED)),
    "lru": (lambda: LruPolicy(EXPECTED), lambda: NaiveLru(EXPECTED)),
    "s3-fifo": (lambda: S3FifoPolicy(EXPECTED, LOOKS_MAX), lambda: NaiveS3Fifo(EXPECTED, LOOKS_MAX)),
}

handles = st.lists(st.integers(0, HANDLES - 1), min_size=1, max_size=HANDLES, unique=True)
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class PolicyMachine(RuleBasedStateMachine):
    """Every history of verbs. Few keys, so that evicted ones are added again; more handles than were expected."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        policy, model = PAIRS[self.name]
        self.policy, self.model = policy(), model()
        self.keys: dict[int, Key] = {}
        self.pins = bytearray(HANDLES)

    def known(self, batch: list[int]) -> list[int]:
        return [handle for handle in batch if handle in self.keys]

    def forget(self, batch: list[int]) -> None:
        for handle in batch:
            del self.keys[handle]
            self.pins[handle] = 0

    @rule(batch=handles, keys=keys, held=st.booleans())
    def add(self, batch: list[int], keys: list[Key], *, held: bool) -> None:
        new = [key for key in keys if key not in self.keys.values()]
        free = [handle for handle in batch if handle not in self.keys][: len(new)]
        new = new[: len(free)]
        self.keys |= dict(zip(free, new, strict=True))
        for handle in free:
            self.pins[handle] = held
        self.policy.add(free, new)
        self.model.add(free, new)

    @rule(batch=handles)
    def hold(self, batch: list[int]) -> None:
        for handle in self.known(batch):
            self.pins[handle] = 1

    @rule(batch=handles)
    def release(self, batch: list[int]) -> None:
        held = [handle for handle in self.known(batch) if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.policy.release(held)
        self.model.release(held)

    @rule(batch=handles)
    def release_after_write(self, batch: list[int]) -> None:
        held = [handle for handle in self.known(batch) if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.policy.release_after_write(held)
        self.model.release_after_write(held)

    @rule(batch=handles)
    def touch(self, batch: list[int]) -> None:
        self.policy.touch(self.known(batch))
        self.model.touch(self.known(batch))

    @rule(batch=handles)
    def remove(self, batch: list[int]) -> None:
        batch = self.known(batch)
        self.policy.remove(batch)
        self.model.remove(batch)
        self.forget(batch)

    def evictable(self) -> int:
        return sum(not self.pins[handle] for handle in self.keys)

    @precondition(lambda self: self.evictable())
    @rule(count=st.integers(1, HANDLES))
    def evict(self, count: int) -> None:
        count = min(count, self.evictable())
        held = {handle for handle in self.keys if self.pins[handle]}
        victims = self.policy.evict(count, self.pins)
        assert list(victims) == self.model.evict(count, held)
        self.forget(list(victims))

    @precondition(lambda self: self.evictable())
    @rule(keys=keys)
    def replace(self, keys: list[Key]) -> None:
        """Common work of a tier: room for newcomers, the newcomers, and their first use."""
        new = [key for key in keys if key not in self.keys.values()][: self.evictable()]
        if new:
            self.evict(len(new))
            free = [handle for handle in range(HANDLES) if handle not in self.keys][: len(new)]
            self.add(free, new, held=False)
            self.touch(free)

    @invariant()
    def length(self) -> None:
        assert len(self.policy) == len(self.model.known()) == len(self.keys)

    def teardown(self) -> None:
        """Check that the remaining handles are evicted in the model's order."""
        self.release(list(range(HANDLES)))
        count = len(self.keys)
        assert list(self.policy.evict(count, self.pins)) == self.model.evict(count, ())
        assert not len(self.policy)


def test_arc_puts_back_into_the_ring_of_before() -> None:
    """A chunk that several requests used, and that was passed over for a write, is no newcomer after the write.

    The ring of newcomers is evicted before it.
    """
    policy = ArcPolicy(EXPECTED)
    policy.add([0, 1, 2], KEYS[:3])
    policy.touch([0, 1])
    policy.touch([0, 1])
    assert list(policy.evict(2, bytes([1, 0, 0]))) == [2, 1]
    policy.release_after_write([0])
    policy.add([3], KEYS[3:4])
    assert list(policy.evict(2, bytes(4))) == [3, 0]


@pytest.mark.parametrize("name", PAIRS)
def test_same_victims_as_the_textbook(name: str) -> None:
    """Linked columns, compact ghosts and lazy counts are optimizations; the textbook is the plain algorithm."""
    machine = type(f"{name} machine", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40, deadline=None))
