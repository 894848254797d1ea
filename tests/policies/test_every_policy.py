"""Contract of every registered policy with the tiers, whatever its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.abc import EvictionPolicy, WriteAwarePolicy
from tierkv.plugins.loading import load_plugins
from tierkv.structures.rings import PASSED_OVER_MAX
from tierkv.types.keys import Key, make_key

HANDLES = 40
ASKED_MAX = 1000
"""Times that a policy may say "not now" before it counts as stuck."""
Opened = Callable[[int | None], EvictionPolicy]


@pytest.fixture(params=sorted(load_plugins().policies))
def opened(request: pytest.FixtureRequest) -> Opened:
    """Factories of each registered policy: tierkv's own, and those of installed plugins."""
    return load_plugins().require_policy(request.param).plugin.open


def keys_of(numbers: Iterable[int]) -> list[Key]:
    """Key per number."""
    return [make_key(number.to_bytes(16, "big"), 0) for number in numbers]


def evicted(policy: EvictionPolicy, count: int, pins: Sequence[int]) -> list[int]:
    """Victims, requested as a tier does: again if the answer is "not now"."""
    for _ in range(ASKED_MAX):
        before = len(policy)
        victims = policy.evict(count, pins)
        assert len(victims) in {0, count}, "all that were requested, or none"
        assert len(policy) == before - len(victims)
        if victims:
            return list(victims)
    raise AssertionError(
        f"evict({count}) returned no victim {ASKED_MAX} times, although {count} handles are unpinned: is a handle "
        "found again that was passed over, and then released?"
    )


def release_after_write(policy: EvictionPolicy, handles: Sequence[int]) -> None:
    """End writes below, as the host tier reports it."""
    (policy.release_after_write if isinstance(policy, WriteAwarePolicy) else policy.release)(handles)


class Counting(bytearray):
    """Holds that count how often they are read."""

    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def filled(opened: Opened, count: int) -> EvictionPolicy:
    """Policy with ``count`` known handles, each used once by its own request."""
    policy = opened(count)
    for first in range(0, count, 128):
        batch = range(first, min(first + 128, count))
        policy.add(batch, keys_of(batch))
        policy.touch(batch[::-1])
    return policy


class Tier:
    """Chunks of a tier, beside a policy that must agree with it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.known: set[int] = set()
        self.pins = bytearray(HANDLES)
        self.keys = 0

    def add(self, batch: list[int]) -> None:
        new = [handle for handle in batch if handle not in self.known]
        self.policy.add(new, keys_of((self.keys + i) % 50 + 50 * handle for i, handle in enumerate(new)))
        self.keys += len(new)
        self.known.update(new)

    def touch(self, batch: list[int]) -> None:
        self.policy.touch([handle for handle in batch if handle in self.known])

    def hold(self, batch: list[int]) -> None:
        for handle in self.known.intersection(batch):
            self.pins[handle] = 1

    def release(self, batch: list[int]) -> None:
        held = [handle for handle in batch if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.policy.release(held)

    def release_after_write(self, batch: list[int]) -> None:
        held = [handle for handle in batch if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        release_after_write(self.policy, held)

    def remove(self, batch: list[int]) -> None:
        mine = [handle for handle in batch if handle in self.known]
        self.policy.remove(mine)
        self.forget(mine)

    def forget(self, batch: list[int]) -> None:
        self.known.difference_update(batch)
        for handle in batch:
            self.pins[handle] = 0

    def evict(self, batch: list[int]) -> None:
        count = min(len(batch), sum(not self.pins[handle] for handle in self.known))
        if not count:
            return
        victims = evicted(self.policy, count, self.pins)
        assert len(set(victims)) == count
        assert self.known.issuperset(victims)
        assert not any(self.pins[victim] for victim in victims)
        self.forget(victims)


VERBS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "hold", "hold", "release", "release_after_write", "remove", "evict", "evict"]),
        st.lists(st.integers(0, HANDLES - 1), min_size=1, max_size=12, unique=True),
    ),
    max_size=80,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chunks_max=st.sampled_from([None, 8, HANDLES]), verbs=VERBS)
def test_no_handle_is_lost_doubled_or_chosen_while_held(
    opened: Opened, chunks_max: int | None, verbs: list[tuple[str, list[int]]]
) -> None:
    """A lost handle is lost memory; a doubled one is two chunks in one slot.

    Evicting a held one puts wrong bytes on a GPU.
    """
    tier = Tier(opened(chunks_max))
    for verb, batch in verbs:
        getattr(tier, verb)(batch)
        assert len(tier.policy) == len(tier.known)
    tier.release(list(range(HANDLES)))
    if tier.known:
        assert set(evicted(tier.policy, len(tier.known), tier.pins)) == tier.known
    assert not len(tier.policy)


def test_all_held_but_one(opened: Opened) -> None:
    """A long prefix that is being loaded can hold nearly the whole tier: the one other chunk must be found.

    In several steps if needed, and the others must still be known afterwards.
    """
    count = 2 * PASSED_OVER_MAX
    policy, pins = filled(opened, count), bytearray([1]) * count
    pins[count // 2] = 0
    assert evicted(policy, 1, pins) == [count // 2]
    held = [handle for handle in range(count) if pins[handle]]
    policy.release(held)
    assert len(policy) == count - 1
    assert set(evicted(policy, count - 1, bytes(count))) == set(held)


def test_a_wall_of_held_chunks_is_passed_in_steps(opened: Opened) -> None:
    """Fifty thousand held chunks before the first evictable one: no single call visits all of them."""
    count = 6 * PASSED_OVER_MAX
    policy = filled(opened, count)
    victims: Sequence[int] = ()
    asked = 0
    while not victims and asked < ASKED_MAX:
        pins = Counting(bytes([1]) * (count - 1) + bytes(1))
        victims = policy.evict(1, pins)
        asked += 1
        assert pins.looks <= 4 * PASSED_OVER_MAX
    assert list(victims) == [count - 1]


def test_not_now_costs_nobody_his_place(opened: Opened) -> None:
    """Some victims are found, then many held chunks: the next choice must get the found ones.

    Otherwise each refused store would leak a few slots.
    """
    free, wall = 100, PASSED_OVER_MAX + 100
    count = free + wall + free
    policy, pins = filled(opened, count), bytearray(free) + bytearray([1]) * wall + bytearray(free)
    victims = evicted(policy, 2 * free, pins)
    assert sorted(victims) == [*range(free), *range(count - free, count)]
    policy.release(range(free, free + wall))
    assert sorted(evicted(policy, wall, bytes(count))) == list(range(free, free + wall))


def test_a_hold_that_lasts_is_not_paid_for_each_time(opened: Opened) -> None:
    """Held chunks of a slow load are in the way of every store: they may be visited now and then, not by each choice.

    Otherwise a tier with a few long loads becomes slow for all requests.
    """
    count, held = 4000, 2000
    policy, pins = filled(opened, count), Counting(bytes([1]) * held + bytes(count - held))
    for number in range(1000):
        handle = evicted(policy, 1, pins)[0]
        policy.add([handle], keys_of([count + number]))
    assert pins.looks < 20 * (1000 + held)


@pytest.mark.parametrize("uses", [0, 1, 5])
def test_no_choice_looks_at_everything(opened: Opened, uses: int) -> None:
    """With a million chunks, a choice that visits all of them stops the engine for seconds.

    The work of one call has a bound that does not grow with the tier, for any history.
    """
    count = 30_000
    policy, worst = filled(opened, count), 0
    for _ in range(uses):
        for first in range(0, count, 1000):
            policy.touch(range(first, first + 1000))
    for number in range(20):
        pins = Counting(count)
        victims = policy.evict(128, pins)
        policy.add(victims, keys_of(range(count + 128 * number, count + 128 * number + len(victims))))
        policy.touch(victims)
        worst = max(worst, pins.looks)
    assert worst <= PASSED_OVER_MAX + 128


def with_history(opened: Opened) -> EvictionPolicy:
    """Policy with 40 known handles, some of them used several times."""
    policy = filled(opened, HANDLES)
    for every in (3, 5, 5, 9):
        policy.touch(range(0, HANDLES, every))
    return policy


def test_the_end_of_a_write_is_no_use(opened: Opened) -> None:
    """A chunk written below is evicted when it would have been without the write.

    Otherwise clean chunks stay, and dirty ones are evicted.
    """
    if not isinstance(opened(None), WriteAwarePolicy):
        pytest.skip("a plugin's policy may take the end of a write for a use")
    written, plain = with_history(opened), with_history(opened)
    for batch in ([7, 3, 30], [0, 39], list(range(10, 20))):
        release_after_write(written, batch)
    for count in (5, 1, 10, 24):
        assert evicted(written, count, bytes(HANDLES)) == evicted(plain, count, bytes(HANDLES))


def test_passed_over_for_a_write_and_next_to_leave(opened: Opened) -> None:
    """A chunk whose turn came during its write is the next victim after the write."""
    if not isinstance(opened(None), WriteAwarePolicy):
        pytest.skip("a plugin's policy may take the end of a write for a use")
    policy = with_history(opened)
    pins = bytearray(HANDLES)
    first = evicted(with_history(opened), 6, pins)
    for handle in first:
        pins[handle] = 1
    others = evicted(policy, 6, pins)
    assert not set(others).intersection(first)
    release_after_write(policy, first)
    assert set(evicted(policy, 6, bytes(HANDLES))) == set(first)


def test_nothing_is_asked_or_told(opened: Opened) -> None:
    """Tiers pass on all batches, also empty ones."""
    policy = opened(10)
    policy.add([], [])
    policy.touch([])
    policy.release([])
    release_after_write(policy, [])
    policy.remove([])
    assert len(policy) == 0


def test_handles_beyond_the_expected_number(opened: Opened) -> None:
    """Most frames are smaller than the maximum, so a tier can hold more chunks than it was opened for.

    Known handles are kept when columns grow.
    """
    policy = opened(2)
    policy.add([0, 1], keys_of([0, 1]))
    policy.add([50_000], keys_of([2]))
    policy.add([99_999], keys_of([3]))
    policy.touch([99_999, 0])
    assert set(evicted(policy, 4, bytes(100_000))) == {0, 1, 50_000, 99_999}


def test_two_of_one_kind_know_nothing_of_each_other(opened: Opened) -> None:
    """Two tiers with one policy object would evict each other's chunks."""
    first, second = opened(10), opened(None)
    first.add([0], keys_of([0]))
    assert (len(first), len(second)) == (1, 0)


def test_what_was_removed_is_never_chosen(opened: Opened) -> None:
    """A corrupt chunk's slot is reused soon; its old position in the order must be gone."""
    policy = filled(opened, 300)
    policy.touch(range(0, 300, 3))
    policy.remove(range(100, 200))
    policy.add(range(100, 150), keys_of(range(1000, 1050)))
    assert sorted(evicted(policy, 250, bytes(300))) == [*range(150), *range(200, 300)]


def test_the_same_history_gives_the_same_victims(opened: Opened) -> None:
    """Replays, simulations and records are useful only if they can be repeated."""
    histories = []
    for _ in range(2):
        policy, history = filled(opened, 200), list[int]()
        for number in range(30):
            policy.touch(range(number, 200, 7))
            victims = evicted(policy, 8, bytes(200))
            history += victims
            policy.add(victims, keys_of((number * 8 + i) % 300 + 200 for i in range(8)))
        histories.append(history)
    assert histories[0] == histories[1]
