"""Order of insertion: the tail of a prompt leaves before its head, in every policy and in any order of the writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from tierkv.abc import EvictionPolicy, PrefixAwarePolicy
from tierkv.plugins.loading import load_plugins
from tierkv.policies import prefix_order
from tierkv.policies.builtin import POLICY_PLUGINS
from tierkv.policies.lru import LruPolicy
from tierkv.policies.prefix_order import NO_CHUNK, PrefixOrder
from tierkv.policies.quotas import Quotas, TenantPolicy
from tierkv.structures.columns import column
from tierkv.structures.ranks import by_request, ranks_of
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import NO_REQUEST

Opened = Callable[[int | None], EvictionPolicy]

CHUNKS, ROOM, PINS = 40, 26, bytes(64)
NAMES = [*sorted(plugin.name for plugin in POLICY_PLUGINS), "quotas"]


def open_policy(name: str, room: int) -> EvictionPolicy:
    """Built-in policy, or that of a tier with quotas."""
    if name == "quotas":
        return TenantPolicy(LruPolicy, Quotas(room), 1)
    return load_plugins().require_policy(name).plugin.open(room)


def keys_of(handles: Sequence[int], prompt: int = 0) -> list[Key]:
    """Key per chunk of a prompt."""
    return [make_key(b"%8d %8d" % (prompt, handle), 0) for handle in handles]


def store(order: PrefixOrder, handles: Sequence[int], request_id: str = "a") -> None:
    """Store chunks of a prompt: handle n is its chunk n."""
    order.add(handles, keys_of(handles), ranks_of(request_id, [handle + 1 for handle in handles]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3, 8, CHUNKS])
def test_the_tail_leaves_first(name: str, size: int) -> None:
    """A head without its tail serves requests, a tail without its head serves none."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    for first in range(0, CHUNKS, size):
        store(order, range(first, min(first + size, CHUNKS)))
    assert [*order.evict(CHUNKS, PINS)] == [*reversed(range(CHUNKS))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_writes_that_end_in_any_order(name: str, seed: int) -> None:
    """Several writes are under way at once, and a later part of a prompt may be acknowledged before an earlier one."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    store(order, range(4))
    batches = [range(first, first + 4) for first in range(4, CHUNKS, 4)]
    random.Random(seed).shuffle(batches)
    for batch in batches:
        store(order, batch)
    left = set(range(CHUNKS))
    while left:
        left.difference_update(order.evict(4, PINS))
        assert left == set(range(len(left)))


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_cannot_fit_keeps_its_head(name: str) -> None:
    """For room for its own tail a prompt evicts nothing of itself; for another prompt its tail leaves."""
    policy = open_policy(name, ROOM)
    order = PrefixOrder(policy)
    store(order, range(ROOM))
    (behind,) = ranks_of("a", [CHUNKS])
    assert not order.evict(1, PINS, behind)
    assert len(policy) == ROOM
    assert order.refuse(behind)
    assert order.is_cut(behind + 1)
    (other,) = ranks_of("b", [1])
    assert [*order.evict(2, PINS, other)] == [ROOM - 1, ROOM - 2]
    assert not order.is_cut(other)


@pytest.mark.parametrize("name", NAMES)
def test_others_leave_before_a_prompt_in_use(name: str) -> None:
    """Chunks of ended requests are evicted for a running one, however many it needs; then the choice ends."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    others = range(20, 40)
    order.add(others, keys_of(others, 1))
    store(order, range(10))
    (behind,) = ranks_of("a", [11])
    gone = [*order.evict(30, PINS, behind), *order.evict(30, PINS, behind)]
    assert sorted(gone) == [*others]
    assert len(policy) == 10


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_ended_requests_are_used_once(name: str) -> None:
    """Every request touches its chunks when it ends. A running one could not store its prompt if that counted."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    others = range(20, 40)
    order.add(others, keys_of(others, 1))
    policy.touch(others)
    store(order, range(10))
    gone = order.evict(8, PINS, *ranks_of("a", [11]))
    assert len(gone) == 8
    assert set(gone) <= set(others)


@pytest.mark.parametrize("name", ["lru", "quotas", "adaptive"])
def test_a_prompt_in_use_is_younger_than_what_was_stored_since(name: str) -> None:
    """A long answer stores its chunks over minutes. Meanwhile others store more, which must not end its caching."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    store(order, range(4))
    others = range(20, 40)
    order.add(others, keys_of(others, 1))
    (behind,) = ranks_of("a", [5])
    gone = order.evict(8, PINS, behind)
    assert len(gone) == 8
    assert set(gone) <= set(others)


def test_a_chain_is_followed_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call on the engine's thread must not walk a million chunks."""
    monkeypatch.setattr(prefix_order, "CHAIN_MAX", 3)
    policy = LruPolicy(CHUNKS)
    order = PrefixOrder(policy)
    store(order, range(4))
    others = range(20, 40)
    order.add(others, keys_of(others, 1))
    assert not order.evict(8, PINS, *ranks_of("a", [5]))


def test_requests_are_remembered_in_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server handles millions of requests."""
    monkeypatch.setattr(prefix_order, "REQUESTS_MAX", 2)
    order = PrefixOrder(LruPolicy(CHUNKS))
    for number in range(4):
        store(order, range(number, number + 1), f"request {number}")
    ranks = [ranks_of(f"request {number}", [9])[0] for number in range(4)]
    assert [order.stop_of(rank) for rank in ranks] == [NO_CHUNK, NO_CHUNK, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_reused_handle_is_not_mistaken(name: str) -> None:
    """Handles are reused: a chain must not lead into the chunk of another prompt, or into one that left."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    store(order, range(6))
    order.forget([3])
    policy.remove([3])
    order.add([3], keys_of([3], 7), ranks_of("b", [1]))
    assert order.stop_of(*ranks_of("a", [9])) == 5
    assert sorted(order.evict(6, PINS)) == [*range(6)]
    assert order.ranked() == []


@pytest.mark.parametrize("name", NAMES)
def test_the_chunks_behind_a_lost_one_are_accepted(name: str) -> None:
    """A damaged or lost chunk is stored anew by the next request. It was not evicted for want of room, so it and those
    behind it are taken in again; behind an evicted one they would serve no request."""
    policy = open_policy(name, CHUNKS)
    order = PrefixOrder(policy)
    store(order, range(6))
    order.forget([5])
    policy.remove([5])
    again, behind, further = ranks_of("a", [6, 7, 8])
    assert not order.is_cut(again, behind, further)
    order.evicted([4])
    policy.remove([4])
    assert order.is_cut(again, behind, further)


def test_a_continued_prefix_belongs_to_its_latest_request() -> None:
    """The second turn of a chat stores chunks behind those of the first, which must not leave for them."""
    policy = LruPolicy(ROOM)
    order = PrefixOrder(policy)
    store(order, range(20), "first turn")
    order.mark(range(20), ranks_of("second turn", range(1, 21)))
    (rank,) = ranks_of("second turn", [21])
    assert order.stop_of(rank) == 19
    assert order.stop_of(*ranks_of("first turn", [21])) == 19, "it may store on, too"
    order.add([20], keys_of([20]), [rank])
    assert [*order.evict(3, PINS)] == [20, 19, 18]


def test_chunks_of_no_request_are_unknown() -> None:
    """Free blocks come without a request, tail first: each is the most recent."""
    assert ranks_of(NO_REQUEST, [16, 32]) == [0, 0]
    order = PrefixOrder(LruPolicy(ROOM))
    order.add([1, 0], keys_of([1, 0]), [0, 0])
    assert order.stop_of(0) == NO_CHUNK
    assert [*order.evict(2, PINS)] == [1, 0]


class Plain:
    """Policy of a plugin without the further verbs: first in, first out."""

    def __init__(self) -> None:
        self.handles: list[int] = []

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.handles += handles

    def touch(self, handles: Sequence[int]) -> None: ...

    def release(self, handles: Sequence[int]) -> None: ...

    def remove(self, handles: Sequence[int]) -> None:
        self.handles = [handle for handle in self.handles if handle not in handles]

    def evict(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        victims, self.handles = self.handles[:count], self.handles[count:]
        return victims

    def __len__(self) -> int:
        return len(self.handles)


def test_the_first_rank_costs_the_same_in_a_large_tier() -> None:
    """Its columns grow with the tier: fifty tiers that grew them all in one step made it 10 ms longer."""
    order, count = PrefixOrder(open_policy("lru", 100_000)), 50_000
    for first in range(0, count, 64):
        handles = range(first, min(count, first + 64))
        order.add(handles, keys_of(handles))
    columns = [order._ranks, order._before, order._behind, order._uses]
    assert min(map(len, columns)) >= count
    order.mark(range(count - 4, count), ranks_of("a", range(1, 5)))
    assert [id(one) for one in (order._ranks, order._before, order._behind, order._uses)] == [*map(id, columns)]


def test_a_policy_without_the_verbs_works_as_before() -> None:
    """The ability is optional: policies written before it keep working."""
    assert not isinstance(Plain(), PrefixAwarePolicy)
    order = PrefixOrder(Plain())
    store(order, range(4))
    store(order, range(4, 8))
    assert [*order.evict(3, PINS, *ranks_of("a", [9]))] == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_of_tierkv_has_the_verbs(name: str) -> None:
    """The promise is about every tier."""
    assert isinstance(open_policy(name, ROOM), PrefixAwarePolicy)


def test_a_marked_prefix_shortens_none_that_goes_on_behind_it() -> None:
    """A request may continue the beginning of another's prompt; that one still ends where it did."""
    order = PrefixOrder(LruPolicy(ROOM))
    store(order, range(20), "long")
    order.mark(range(10), ranks_of("short", range(1, 11)))
    assert order.stop_of(*ranks_of("long", [21])) == 19
    assert order.stop_of(*ranks_of("short", [11])) == 9
    order.mark([0, 1, *range(12, 20)], ranks_of("third", range(1, 11)))  # 10 and 11 are not in the tier at the moment
    assert order.stop_of(*ranks_of("long", [21])) == 19


def test_a_prefix_that_leads_to_itself_is_followed_once() -> None:
    """Chunks of two groups may have one rank, and each may be known as the one before the other."""
    order = PrefixOrder(LruPolicy(ROOM))
    (rank,) = ranks_of("a", [16])
    order.add([0], keys_of([0]), [rank])
    order.add([1], keys_of([1]), [rank])
    order.mark([0, 1], ranks_of("b", [16, 32]))
    assert order.stop_of(*ranks_of("b", [48])) == 1
    assert [*order.evict(2, PINS)] == [0, 1]
    assert order.stop_of(*ranks_of("b", [48])) == order.stop_of(rank) == NO_CHUNK


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_not_evicted_for_its_own_tail(name: str) -> None:
    """An index of an earlier process has another order than the prompt. Whichever chunks of it a policy chooses first,
    they stay while there are others, and where there are none the tail is refused."""
    policy = open_policy(name, ROOM)
    keys = keys_of(range(ROOM))
    order = PrefixOrder(policy, keys.__getitem__)
    shuffled = [*range(ROOM)]
    random.Random(7).shuffle(shuffled)
    policy.add(shuffled, [keys[handle] for handle in shuffled])
    ranks = ranks_of("a", range(1, 20))
    order.mark(range(18), ranks[:18])
    policy.release([*reversed(range(18))])
    victims: list[int] = []
    for _ in range(ROOM):
        victims += order.evict(3, PINS, ranks[18])
    assert set(victims) <= {*range(18, ROOM)}
    assert len(policy) == ROOM - len(victims)
    assert sorted([*victims, *order.evict(len(policy), PINS)]) == [*range(ROOM)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_head_that_another_request_used_since_is_not_evicted_for_the_tail(name: str, seed: int) -> None:
    """Requests share heads. The rank of a chunk names its last request only, but all chunks behind it need it."""
    policy = open_policy(name, ROOM)
    keys = keys_of(range(ROOM))
    order = PrefixOrder(policy, keys.__getitem__)
    shuffled = [*range(ROOM)]
    random.Random(seed).shuffle(shuffled)
    policy.add(shuffled, [keys[handle] for handle in shuffled])
    order.mark(range(10), ranks_of("a", range(1, 11)))
    order.mark(range(5), ranks_of("b", range(1, 6)))
    victims = [handle for _ in range(ROOM) for handle in order.evict(2, PINS, *ranks_of("a", [11]))]
    assert {*victims} <= {*range(10, ROOM)}
    assert len(policy) == ROOM - len(victims)


@pytest.mark.parametrize("name", NAMES)
def test_chunks_before_others_are_evicted_with_them(name: str) -> None:
    """A head is protected by the chunks behind it, and by nothing after them: no chunk stays in a tier for ever."""
    policy = open_policy(name, ROOM)
    keys = keys_of(range(ROOM))
    order = PrefixOrder(policy, keys.__getitem__)
    store(order, range(20), "a")
    order.mark(range(12), ranks_of("b", range(1, 13)))
    order.mark(range(6), ranks_of("c", range(1, 7)))
    victims: list[int] = []
    for handle in range(20, ROOM):
        store(order, [handle], "d")
        victims += order.evict(4, PINS, *ranks_of("d", [handle + 2]))
    assert [handle for handle in victims if handle < 20] == [*range(19, 19 - sum(v < 20 for v in victims), -1)]
    assert len(victims) >= 15


def test_more_chunks_behind_one_than_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many conversations may share a head. Its count ends at a bound, and it still leaves when it is chosen alone."""
    monkeypatch.setattr(prefix_order, "BEHIND_MAX", 3)
    order = PrefixOrder(LruPolicy(ROOM), keys_of(range(ROOM)).__getitem__)
    store(order, [0], "a")
    for handle in range(1, 8):
        order.mark([0], ranks_of(f"{handle}", [1]))
        store(order, [handle], f"{handle}")
    assert order._behind[0] == 3
    assert sorted(order.evict(8, PINS)) == [*range(8)]
    store(order, [0], "b")
    assert order._behind[0] == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_that_fills_a_gap_displaces_none_before_it(name: str) -> None:
    """A write may end late. What makes room for it is the end of the prompt, not its beginning."""
    policy = open_policy(name, ROOM)
    keys = keys_of(range(ROOM))
    order = PrefixOrder(policy, keys.__getitem__)
    shuffled = [*range(10), *range(11, ROOM)]
    random.Random(3).shuffle(shuffled)
    policy.add(shuffled, [keys[handle] for handle in shuffled])
    present = [*range(10), *range(11, 20)]
    order.mark(present, ranks_of("a", [handle + 1 for handle in present]))
    (rank,) = ranks_of("a", [11])
    assert order.fills_gap(rank)
    victims: list[int] = []
    for _ in range(ROOM):
        victims += order.evict(1, PINS, rank)
    assert {*victims} <= {*range(11, ROOM)}
    own = [handle for handle in victims if handle < 20]
    assert own == [*range(19, 19 - len(own), -1)], "from the end"


def test_chunks_that_are_stored_again_are_linked_with_those_around_them() -> None:
    """A batch of them may be marked before the one before it in the prefix."""
    policy = LruPolicy(ROOM)
    order = PrefixOrder(policy)
    policy.add([*range(8)], keys_of(range(8)))
    order.mark_again([4, 5, 6, 7], ranks_of("a", [5, 6, 7, 8]))
    order.mark_again([0, 1, 2, 3], ranks_of("a", [1, 2, 3, 4]))
    assert [*order._behind[:8]] == [1, 1, 1, 1, 1, 1, 1, 0]


def test_a_lost_chunk_leaves_no_gap_between_its_neighbours() -> None:
    """The chunks behind it serve requests again when it is stored anew. Those before it are needed for that."""
    order = PrefixOrder(LruPolicy(ROOM))
    store(order, range(8), "a")
    order.forget([4])
    assert [*order._behind[:8]] == [1, 1, 1, 1, 0, 1, 1, 0]


def test_chunks_of_several_requests_are_told_apart() -> None:
    """A batch of stores may be of several requests, in any order; those without a rank or a handle are left out."""
    first, second = ranks_of("a", [1, 2, 3]), ranks_of("b", [5, 6])
    ranks, handles = [second[1], first[2], 0, first[0], second[0], first[1]], [8, 3, 4, 1, 7, None]
    found = {tuple(some): their for some, their in by_request(handles, ranks)}
    assert found == {(1, 3): [first[0], first[2]], (7, 8): second}


def test_the_rank_of_a_chunk_is_kept_once() -> None:
    """A tier knows ranks also of chunks that the policy does not know: they are written, or leave. 8 bytes a chunk."""
    ranks = column("Q", CHUNKS)
    order = PrefixOrder(LruPolicy(CHUNKS), None, ranks)
    store(order, range(4))
    assert [*ranks[:5]] == [*ranks_of("a", [1, 2, 3, 4]), 0]
    order.mark([0, 1], ranks_of("b", [1, 2]))
    assert [*ranks[:2]] == ranks_of("b", [1, 2])
    assert order.evict(1, PINS) == [3]
    assert order.ranks_at([2, 3]) == [*ranks_of("a", [3]), 0]
    assert [ranks[3]] == ranks_of("a", [4])
