"""Policies of plugins: the decisions they may make, and the handling of failures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
from at_rest import content_of
from core_parts import DISK, FRAME_BYTES
from panics import Panic

from tierkv.abc import AdmissionPolicy, RequestAwarePolicy
from tierkv.manager.contract import RequestContext
from tierkv.manager.host.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.guarded import GuardedPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.observation import RequestObservation
from tierkv.types.tier_ops import Verb

WHO = RequestContext("a")
CHUNK_BYTES = 4096


def run(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


class Breakable(LruPolicy):
    """Valid policy, until one of its verbs is replaced."""


class SecondSight(LruPolicy):
    """Policy that admits chunks at the second request, or if no chunk must be evicted for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Key] = set()

    def refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        refused = [i for i, key in enumerate(keys) if i >= free and key not in self.seen]
        self.seen.update(keys)
        return refused


class Listener(LruPolicy):
    """Policy that observes requests."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[RequestObservation] = []

    def observe_request(self, observation: RequestObservation) -> None:
        self.heard.append(observation)


def manager_over(policy: LruPolicy, slots: int, *lower: LowerTier) -> OffloadManager:
    """Manager whose host tier has a plugin's policy."""
    counters = CoreCounters()
    host = HostTier(slots, GuardedPolicy(policy, HOST, counters))
    return OffloadManager(host, lower, [CHUNK_BYTES], slots, counters)


def store(manager: OffloadManager, keys: Sequence[Key]) -> tuple[Key, ...]:
    """Make chunks readable. Returns the admitted ones."""
    grant = manager.prepare_store([(key, 0) for key in keys], WHO)
    assert grant is not None
    manager.complete_store(grant.slots)
    manager.validate()
    return grant.keys


class Unaware(Breakable):
    """Policy without a verb for the end of writes."""

    release_after_write = None  # type: ignore[assignment]  # as if it were not there


def raising(*_: object) -> Sequence[int]:
    """Verb with a bug."""
    raise ZeroDivisionError


def held(count: int, pins: Sequence[int]) -> Sequence[int]:
    """Choose held chunks: their bytes would be overwritten while they are read."""
    return [handle for handle in range(4) if pins[handle]][:count]


def the_same_twice(count: int, pins: Sequence[int]) -> Sequence[int]:
    """Choose one chunk twice."""
    return [3] * count


def unknown(count: int, pins: Sequence[int]) -> Sequence[int]:
    """Choose slots that do not exist."""
    return range(10**6, 10**6 + count)


def too_few(count: int, pins: Sequence[int]) -> Sequence[int]:
    """Choose fewer than requested, but not none."""
    return [3] * (count - 1)


def nonsense(count: int, pins: Sequence[int]) -> Sequence[int]:
    """Choose values of another type."""
    return ["3"] * count  # type: ignore[list-item]  # that is the point


WRONG = [raising, held, the_same_twice, unknown, too_few, nonsense]


@pytest.mark.parametrize("evict", WRONG)
def test_a_policy_that_chooses_wrongly(evict: Callable[[int, Sequence[int]], Sequence[int]]) -> None:
    """Promises 1 and 3: a chunk that is being loaded keeps its slot, the store gets others, and it is counted once."""
    policy = Breakable()
    manager = manager_over(policy, 4)
    store(manager, run(0, 4))
    load = manager.prepare_load(run(0, 1), WHO)
    policy.evict = evict  # type: ignore[method-assign]  # a bug that appears later
    assert store(manager, run(10, 2)) == tuple(run(10, 2))
    assert store(manager, run(20, 2)) == tuple(run(20, 2))
    assert manager.lookup(run(0, 1)[0], WHO) is LookupResult.HIT
    assert manager.counters.policies_failed == {HOST: 1}
    manager.complete_load(load.slots)
    store(manager, run(30, 4))
    assert manager.prepare_load(run(30, 4), WHO)


@pytest.mark.parametrize("policy", [Breakable(), Unaware()])
def test_the_end_of_a_write_is_told_as_the_policy_can_hear_it(policy: LruPolicy) -> None:
    """A policy without that verb gets a use instead: chunks that it passed over must be returned to it.

    Otherwise a slot is lost forever.
    """
    counters = CoreCounters()
    host = HostTier(2, GuardedPolicy(policy, HOST, counters))
    slots = [host.filled(host.admit([key], ChunkState.STORING), ChunkEvent.STORED).slots[0] for key in run(0, 2)]
    host.pin_to_write(slots[:1])
    assert host.evict_for(1).keys == run(1, 1)
    host.filled(host.admit(run(1, 1), ChunkState.STORING), ChunkEvent.STORED)
    host.unpin_written(slots[:1])
    assert host.evict_for(1).keys == (run(1, 1) if isinstance(policy, Unaware) else run(0, 1))
    assert host.evict_for(2)
    assert not counters.policies_failed


def test_a_policy_that_raises_at_the_end_of_a_write() -> None:
    """Promise 3, as for every other verb."""
    policy, counters = Breakable(), CoreCounters()
    policy.release_after_write = raising  # type: ignore[assignment]  # a bug that appears later
    host = HostTier(2, GuardedPolicy(policy, HOST, counters))
    slots = host.filled(host.admit(run(0, 2), ChunkState.STORING), ChunkEvent.STORED).slots
    host.pin_to_write(slots)
    host.unpin_written(slots)
    assert counters.policies_failed == {HOST: 1}
    assert host.evict_for(2)


def panicking(*_: object) -> Sequence[int]:
    """Verb of compiled code that panics."""
    raise Panic


def interrupted(*_: object) -> Sequence[int]:
    """Verb during which the user presses Control-C."""
    raise KeyboardInterrupt


def test_the_users_interrupt_is_no_fault_of_a_policy() -> None:
    """The engine's thread is mostly the main one: Control-C must end the program."""
    policy = Breakable()
    manager = manager_over(policy, 3)
    policy.add = interrupted  # type: ignore[assignment]  # returns nothing
    with pytest.raises(KeyboardInterrupt):
        store(manager, run(0, 1))
    assert not manager.counters.policies_failed


@pytest.mark.parametrize("fault", [raising, panicking])
@pytest.mark.parametrize("verb", ["add", "touch", "release", "remove"])
def test_a_policy_that_raises(verb: str, fault: Callable[..., Sequence[int]]) -> None:
    """Promise 3: for each verb, the engine notices nothing, and every chunk can still be evicted."""
    policy = Breakable()
    manager = manager_over(policy, 3)
    store(manager, run(0, 1))
    setattr(policy, verb, fault)
    store(manager, run(1, 2))
    manager.touch(run(0, 3))
    load = manager.prepare_load(run(0, 2), WHO)
    manager.complete_load(load.slots, load.slots[1:])
    store(manager, run(10, 3))
    assert manager.counters.policies_failed == {HOST: 1}
    manager.reset_cache()
    manager.begin_step(1.0)
    manager.validate()


def test_a_policy_that_says_not_now() -> None:
    """None of the requested victims: the store is refused, nothing has changed (S18), and it is no failure."""
    policy = Breakable()
    manager = manager_over(policy, 2)
    store(manager, run(0, 2))
    manager.take_events()
    policy.evict = lambda _count, _pins: []  # type: ignore[method-assign]  # its right
    assert manager.prepare_store([(run(9, 1)[0], 0)], WHO) is None
    assert not manager.take_events()
    assert [manager.lookup(key, WHO) for key in run(0, 2)] == [LookupResult.HIT] * 2
    assert (manager.counters.stores_refused, manager.counters.policies_failed) == (1, {})
    manager.validate()


def test_a_policy_may_refuse_newcomers() -> None:
    """Under pressure a store is granted only in part; refused chunks are admitted the next time."""
    manager = manager_over(SecondSight(), 2)
    assert store(manager, run(0, 3)) == tuple(run(0, 2))
    assert manager.counters.admissions_refused == {HOST: 1}
    assert store(manager, run(2, 1)) == tuple(run(2, 1))


def test_a_policy_below_may_refuse_newcomers() -> None:
    """A lower tier is not written chunks that its policy refuses."""
    limits = LowerTierLimits(2 * FRAME_BYTES, write=WritePolicy.THROUGH, queue_chunks_max=10)
    lower = LowerTier(0, "disk", DISK, limits, SecondSight())
    lower.load_index(content_of([(key, FRAME_BYTES) for key in run(90, 2)]))
    manager = manager_over(LruPolicy(), 8, lower)
    store(manager, run(0, 3))
    assert not manager.take_ops()
    assert manager.counters.admissions_refused == {"disk": 3}
    manager.reset_cache()
    store(manager, run(1, 1))
    (delete,) = manager.take_ops()
    assert delete.verb is Verb.DELETE, "room is made for the one that was seen again"


def test_a_refusal_that_fails_refuses_nobody() -> None:
    """Neither an exception nor an answer of another type excludes chunks."""
    policy = SecondSight()
    manager = manager_over(policy, 4)
    policy.refuse = lambda _keys, _free: 7  # type: ignore[method-assign,assignment,return-value]  # that is the point
    assert store(manager, run(0, 2)) == tuple(run(0, 2))
    policy.refuse = raising  # type: ignore[method-assign]  # that is the point
    assert store(manager, run(2, 2)) == tuple(run(2, 2))
    assert manager.counters.policies_failed == {HOST: 1}


def test_a_guard_has_the_abilities_of_its_policy() -> None:
    """Abilities are found by their methods: an extra one would be called without effect, a missing one never."""
    counters = CoreCounters()
    plain, strict, curious = (GuardedPolicy(made, HOST, counters) for made in (Breakable(), SecondSight(), Listener()))
    assert [isinstance(guard, AdmissionPolicy) for guard in (plain, strict, curious)] == [False, True, False]
    assert [isinstance(guard, RequestAwarePolicy) for guard in (plain, strict, curious)] == [False, False, True]
