"""LRU against a naive model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.policies import POLICY_PLUGINS
from tierkv.policies.lru import LruPolicy
from tierkv.types.keys import Key

A, B, C = Key(b"a"), Key(b"b"), Key(b"c")
keys = st.sampled_from([Key(bytes([letter])) for letter in b"abcdefgh"])


class LruMachine(RuleBasedStateMachine):
    """Every history of verbs, against a list that is searched from its front.

    It exists because a policy that forgets or doubles a key leaks host memory or evicts a pinned chunk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy()
        self.order: list[Key] = []
        self.held: list[Key] = []

    @rule(key=keys)
    def add(self, key: Key) -> None:
        if key not in self.order and key not in self.held:
            self.order.append(key)
        self.policy.add(key)

    @rule(key=keys)
    def hold(self, key: Key) -> None:
        if key in self.order:
            self.order.remove(key)
            self.held.append(key)
        self.policy.hold(key)

    @rule(key=keys)
    def release(self, key: Key) -> None:
        if key in self.held:
            self.held.remove(key)
            self.order.append(key)
        self.policy.release(key)

    @rule(touched=st.lists(keys, max_size=10))
    def touch(self, touched: list[Key]) -> None:
        for key in touched:
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)
        self.policy.touch(touched)

    @rule(key=keys)
    def remove(self, key: Key) -> None:
        self.order = [kept for kept in self.order if kept != key]
        self.held = [kept for kept in self.held if kept != key]
        self.policy.remove(key)

    @rule()
    def evict(self) -> None:
        assert self.policy.evict() == (self.order.pop(0) if self.order else None)

    @invariant()
    def length(self) -> None:
        assert len(self.policy) == len(self.order)

    def teardown(self) -> None:
        """What is left must leave in the model's order."""
        assert [self.policy.evict() for _ in self.order] == self.order
        assert self.policy.evict() is None


TestLru = LruMachine.TestCase


def test_s54_tail_leaves_before_head() -> None:
    """S54: touched tail first, a prefix loses its tail first, so that what is left is still a prefix."""
    policy = LruPolicy()
    for key in (A, B, C):
        policy.add(key)
    policy.touch([C, B, A])
    assert [policy.evict() for _ in range(4)] == [C, B, A, None]


def test_s55_touching_the_unknown_and_the_held_is_harmless() -> None:
    """S55: the scheduler touches what a request uses, and does not know what is still here."""
    policy = LruPolicy()
    policy.add(A)
    policy.hold(A)
    policy.touch([A, B])
    assert policy.evict() is None
    policy.release(A)
    assert policy.evict() == A


def test_plugin_opens_a_policy_of_its_own_each_time() -> None:
    """Two tiers with one policy object would evict each other's chunks."""
    (plugin,) = POLICY_PLUGINS
    first, second = plugin.open(10), plugin.open(None)
    first.add(A)
    assert (plugin.name, len(first), len(second)) == ("lru", 1, 0)
