"""LRU against a naive model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.policies.lru import LruPolicy
from tierkv.structures.rings import PASSED_OVER_MAX
from tierkv.types.keys import Key

A, B, C = range(3)
HANDLES = 10
handles = st.lists(st.integers(0, HANDLES - 1), max_size=HANDLES, unique=True)
UNHELD = bytes(100_000)


def keys_of(batch: list[int]) -> list[Key]:
    """Keys of handles."""
    return [Key(b"key%d" % handle) for handle in batch]


def added(policy: LruPolicy, *batch: int) -> LruPolicy:
    """Policy that knows these handles."""
    policy.add(batch, keys_of(list(batch)))
    return policy


class LruMachine(RuleBasedStateMachine):
    """Every history of verbs, against a list that is searched from its front.

    It exists because a policy that forgets or doubles a handle leaks host memory or evicts a pinned chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy(4)  # handles beyond it come as well
        self.order: list[int] = []
        self.passed_over: set[int] = set()
        self.pins = bytearray(HANDLES)

    def known(self, batch: list[int]) -> list[int]:
        return [handle for handle in batch if handle in self.order]

    def used(self, batch: list[int]) -> None:
        self.order = [handle for handle in self.order if handle not in batch] + batch
        self.passed_over.difference_update(batch)

    @rule(batch=handles)
    def add(self, batch: list[int]) -> None:
        new = [handle for handle in batch if handle not in self.order]
        self.order += new
        added(self.policy, *new)

    @rule(batch=handles)
    def hold(self, batch: list[int]) -> None:
        for handle in self.known(batch):
            self.pins[handle] = 1

    @rule(batch=handles)
    def release(self, batch: list[int]) -> None:
        held = [handle for handle in self.known(batch) if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.used(held)
        self.policy.release(held)

    @rule(batch=handles)
    def release_after_write(self, batch: list[int]) -> None:
        held = [handle for handle in self.known(batch) if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        first = [handle for handle in held if handle in self.passed_over]
        self.passed_over.difference_update(first)
        self.order = first + [handle for handle in self.order if handle not in first]
        self.policy.release_after_write(held)

    @rule(batch=handles)
    def touch(self, batch: list[int]) -> None:
        batch = self.known(batch)
        self.used(batch)
        self.policy.touch(batch)

    @rule(batch=handles)
    def remove(self, batch: list[int]) -> None:
        batch = self.known(batch)
        self.order = [handle for handle in self.order if handle not in batch]
        for handle in batch:
            self.pins[handle] = 0
        self.passed_over.difference_update(batch)
        self.policy.remove(batch)

    @precondition(lambda self: self.evictable())
    @rule(count=st.integers(1, HANDLES))
    def evict(self, count: int) -> None:
        victims = self.evictable()[: min(count, len(self.evictable()))]
        assert self.policy.evict(len(victims), self.pins) == victims
        before = self.order[: self.order.index(victims[-1])]
        self.passed_over.update(handle for handle in before if self.pins[handle])
        self.order = [handle for handle in self.order if handle not in victims]

    def evictable(self) -> list[int]:
        return [handle for handle in self.order if not self.pins[handle]]

    @invariant()
    def length(self) -> None:
        assert len(self.policy) == len(self.order)

    def teardown(self) -> None:
        """Check that the remaining handles are evicted in the model's order."""
        self.release(list(range(HANDLES)))
        assert self.policy.evict(len(self.order), self.pins) == self.order
        assert not len(self.policy)


TestLru = LruMachine.TestCase


def test_s54_tail_leaves_before_head() -> None:
    """S54: touched tail first, a prefix loses its tail first, so that the rest is still a prefix."""
    policy = added(LruPolicy(), A, B, C)
    policy.touch([C, B, A])
    assert policy.evict(3, UNHELD) == [C, B, A]


def test_too_few_can_be_chosen_then_none_is() -> None:
    """All or nothing: a store that cannot be granted whole must change no position (S18)."""
    policy = added(LruPolicy(), A, B, C)
    assert policy.evict(3, bytes([0, 1, 0])) == []
    assert len(policy) == 3
    assert policy.evict(2, bytes([0, 1, 0])) == [A, C]


def test_many_held_ones_in_the_way_are_passed_over_in_steps() -> None:
    """A hundred thousand held chunks at the front must not stop the engine's thread.

    A choice gives up after some of them, and the next one continues there, so it succeeds within a bound.
    """
    count = 4 * PASSED_OVER_MAX
    policy = LruPolicy(count + 1)
    policy.add(range(count + 1), keys_of(list(range(count + 1))))
    pins = bytearray([1]) * count + bytes(1)
    answers = []
    while not answers or not answers[-1]:
        answers.append(policy.evict(1, pins))
    assert answers == [[]] * 4 + [[count]]
    policy.release(range(count))
    assert policy.evict(2, UNHELD) == [0, 1]


def test_handles_beyond_the_expected_number() -> None:
    """Most frames are smaller than the maximum, so a tier can hold more chunks than it was opened for.

    Known handles are kept when columns grow.
    """
    policy = added(LruPolicy(2), A, B)
    policy.touch([A])
    added(policy, 50_000)
    added(policy, 99_999)
    assert policy.evict(4, UNHELD) == [B, A, 50_000, 99_999]
