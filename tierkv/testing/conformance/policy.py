"""Conformance of eviction policies: what a tier relies on, as a test class to inherit from.

::

    from tierkv.testing import PolicyConformance

    class TestFoo(PolicyConformance):
        plugin = tierkv_foo.POLICY

The tests drive a policy as a tier does, through the order of insertion
(:class:`~tierkv.policies.prefix_order.PrefixOrder`). Those of :class:`~tierkv.abc.PrefixAwarePolicy` are left out for a
policy without that ability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from tierkv.abc import EvictionPolicy, PolicyPlugin, PrefixAwarePolicy
from tierkv.policies.prefix_order import PrefixOrder
from tierkv.structures.ranks import ranks_of
from tierkv.types.keys import Key, make_key

ROOM, PROMPT, STEP = 26, 40, 5
"""Chunks that fit the tier; chunks of a prompt that does not fit; chunks that are stored at once."""
ASKED_MAX = 1000
"""Number of times that a policy may find no victim for now before it counts as stuck."""
STUCK = "evict found fewer victims than are unpinned: return exactly `count` of the handles with pins[handle] == 0"


class TierOfPolicy:
    """Tier of :data:`ROOM` chunks that a policy orders. Chunks that are refused are not stored.

    Attributes:
        keys: handle of each stored chunk.
        pins: number of pins by handle.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.keys: dict[Key, int] = {}
        self.pins = bytearray(ROOM)
        self._order = PrefixOrder(policy)
        self._policy = policy

    def store(self, prompt: int, chunks: Sequence[int], request_id: str = "") -> None:
        """Store chunks of a prompt, and evict for them. Without a request id they come without their order."""
        keys = key_of(prompt, chunks)
        ranks = ranks_of(request_id, [chunk + 1 for chunk in chunks])
        for key, rank in zip(keys, ranks, strict=True):
            if self._order.is_cut(rank):
                return
            if len(self.keys) == ROOM and not self.evict(1, rank):
                assert self._order.refuse(rank), "a policy that has unpinned chunks must find one at last"
                return
            handle = min(set(range(ROOM)) - set(self.keys.values()))
            self.keys[key] = handle
            self._order.add([handle], [key], [rank])

    def evict(self, count: int, rank: int = 0) -> int:
        """Evict as a tier does: again, if there are no victims for now. Returns the number of victims."""
        for _ in range(ASKED_MAX):
            victims = list(self._order.evict(count, self.pins, rank))
            assert len(set(victims)) == len(victims), f"victims twice: {victims}"
            assert set(victims) <= set(self.keys.values()), f"victims that are unknown: {victims}"
            assert not any(self.pins[victim] for victim in victims), f"victims that are pinned: {victims}"
            self.keys = {key: handle for key, handle in self.keys.items() if handle not in victims}
            assert len(self._policy) == len(self.keys), "the policy has forgotten others than its victims"
            if victims or self._order.stop_of(rank) >= 0:
                return len(victims)
        return 0

    def release(self) -> None:
        """End all pins."""
        released = [handle for handle in self.keys.values() if self.pins[handle]]
        self.pins[:] = bytes(ROOM)
        self._policy.release(released)

    def head(self, prompt: int) -> int:
        """Number of chunks from the front of a prompt that are in the tier."""
        here = [key in self.keys for key in key_of(prompt, range(PROMPT))]
        return [*here, False].index(False)


def key_of(prompt: int, chunks: Sequence[int]) -> list[Key]:
    """Make the keys by which a tier knows ``chunks`` of a prompt; no two prompts share any."""
    return [make_key(b"%8d%8d" % (prompt, chunk), 0) for chunk in chunks]


class PolicyConformance:
    """Inherit, and set ``plugin``."""

    plugin: ClassVar[PolicyPlugin]
    """The policy under test."""

    @pytest.fixture
    def tier(self) -> TierOfPolicy:
        """Empty tier with the policy."""
        return TierOfPolicy(self.plugin.open(ROOM))

    def need_prefixes(self) -> None:
        """Skip for a policy that does not order the chunks of a prompt."""
        if not isinstance(self.plugin.open(ROOM), PrefixAwarePolicy):
            pytest.skip("it has no add_behind() and evict_before() (PrefixAwarePolicy)")

    def test_a_full_tier_always_finds_a_victim(self, tier: TierOfPolicy) -> None:
        """A policy that finds none although chunks are unpinned stops every store."""
        tier.store(1, range(ROOM))
        for handle in range(0, ROOM, 2):
            tier.pins[handle] = 1
        assert tier.evict(ROOM // 2) == ROOM // 2, STUCK

    def test_a_pinned_chunk_stays_known(self, tier: TierOfPolicy) -> None:
        """The tier reads or writes it; it is evictable again afterwards."""
        tier.store(1, range(ROOM))
        tier.pins[:] = b"\x01" * ROOM
        tier.pins[3] = 0
        assert tier.evict(1) == 1, STUCK
        tier.release()
        assert tier.evict(ROOM - 1) == ROOM - 1, STUCK

    @pytest.mark.parametrize("step", [1, STEP, ROOM])
    def test_the_tail_of_a_prompt_leaves_first(self, tier: TierOfPolicy, step: int) -> None:
        """Chunks serve a request only together with those before them, and a long prompt is stored in many steps."""
        self.need_prefixes()
        for first in range(0, ROOM, step):
            tier.store(1, range(first, min(first + step, ROOM)), "a")
        for left in reversed(range(ROOM)):
            assert tier.evict(1) == 1
            assert tier.head(1) == left

    def test_a_prompt_that_cannot_fit_keeps_its_head(self, tier: TierOfPolicy) -> None:
        """The chunks without room are refused; in place of the head they would be useless."""
        self.need_prefixes()
        for first in range(0, PROMPT, STEP):
            tier.store(1, range(first, first + STEP), "a")
        assert tier.head(1) == ROOM

    def test_a_prompt_takes_the_room_of_ended_requests(self, tier: TierOfPolicy) -> None:
        """Nothing is refused while other chunks can leave."""
        self.need_prefixes()
        for prompt in range(2, 6):
            tier.store(prompt, range(6), f"request {prompt}")
        for first in range(0, PROMPT, STEP):
            tier.store(1, range(first, first + STEP), "a")
        assert tier.head(1) >= ROOM // 2

    def test_two_prompts_in_turn(self, tier: TierOfPolicy) -> None:
        """Two requests run at once, and neither fits beside the other: what is kept is heads."""
        self.need_prefixes()
        for first in range(0, PROMPT, STEP):
            for prompt in 1, 2:
                tier.store(prompt, range(first, first + STEP), f"request {prompt}")
        assert tier.head(1) + tier.head(2) == len(tier.keys)
