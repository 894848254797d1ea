"""Quotas per tenant: any policy under them, against a model that counts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.abc import EvictionPolicy
from tierkv.policies.lru import LruPolicy
from tierkv.policies.quotas import EXPECTED_MIN, LOOKS_MAX, OTHERS, TRIMMED_MAX, Quotas, TenantPolicy
from tierkv.types.keys import NO_TENANT, Key, Tenant, make_key, make_scope, tenant_of, tenant_of_salt
from tierkv.types.observation import RequestObservation, RequestPhase

SALTS = [None, "a", "b", "c"]
A, B = tenant_of_salt("a"), tenant_of_salt("b")
HANDLES = 40
UNHELD = bytes(100_000)


def key_of(handle: int, salt: str | None) -> Key:
    """Key of a chunk of a tenant."""
    return make_key(b"%06d" % handle, 0, make_scope(salt, None))


def policy_of(capacity: int, each: int | None = None, named: dict[Tenant, int] | None = None) -> TenantPolicy:
    """LRU per tenant, in a tier where each chunk has one byte."""
    return TenantPolicy(LruPolicy, Quotas(capacity, each, named or {}), 1)


def add(policy: TenantPolicy, handles: list[int], salt: str | None) -> None:
    """Add readable chunks of one tenant."""
    policy.add(handles, [key_of(handle, salt) for handle in handles])


class TenantMachine(RuleBasedStateMachine):
    """Every history of verbs, against sets of handles.

    A wrapper that forgets or doubles a handle leaks a slot; one that confuses tenants lets one evict another's chunks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy_of(HANDLES, 12, {A: 5})
        self.owner: dict[int, str | None] = {}
        self.order: list[int] = []
        self.pins = bytearray(HANDLES)

    def of(self, salt: str | None) -> list[int]:
        return [handle for handle in self.order if self.owner[handle] == salt]

    def gone(self, handles: list[int]) -> None:
        for handle in handles:
            self.order.remove(handle)
            del self.owner[handle]

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True), data=st.data())
    def add(self, batch: list[int], data: st.DataObject) -> None:
        new = [handle for handle in batch if handle not in self.owner]
        salts = [data.draw(st.sampled_from(SALTS)) for _ in new]
        self.owner.update(zip(new, salts, strict=True))
        self.order += new
        self.policy.add(new, [key_of(handle, salt) for handle, salt in zip(new, salts, strict=True)])

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True))
    def touch(self, batch: list[int]) -> None:
        known = [handle for handle in batch if handle in self.owner]
        self.policy.touch(known)
        self.order = [handle for handle in self.order if handle not in known] + known

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True))
    def hold(self, batch: list[int]) -> None:
        for handle in batch:
            self.pins[handle] = handle in self.owner

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True))
    def release(self, batch: list[int]) -> None:
        held = [handle for handle in batch if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.policy.release(held)
        self.order = [handle for handle in self.order if handle not in held] + held

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True))
    def release_after_write(self, batch: list[int]) -> None:
        held = [handle for handle in batch if self.pins[handle]]
        for handle in held:
            self.pins[handle] = 0
        self.policy.release_after_write(held)

    @rule(batch=st.lists(st.integers(0, HANDLES - 1), unique=True))
    def remove(self, batch: list[int]) -> None:
        known = [handle for handle in batch if handle in self.owner]
        self.policy.remove(known)
        self.gone(known)
        for handle in known:
            self.pins[handle] = 0

    @rule(count=st.integers(1, HANDLES))
    def evict(self, count: int) -> None:
        free = [handle for handle in self.order if not self.pins[handle]]
        count = min(count, len(free))
        victims = list(self.policy.evict(count, self.pins))
        assert len(set(victims)) == count
        assert set(victims) <= set(free), "a held or unknown chunk was chosen"
        self.gone(victims)

    @rule()
    def trim(self) -> None:
        before = {salt: len(self.of(salt)) for salt in SALTS}
        victims = self.policy.trim(self.pins)
        assert all(not self.pins[handle] for handle in victims)
        lost = {salt: sum(self.owner[handle] == salt for handle in victims) for salt in SALTS}
        self.gone(victims)
        for salt, quota in [(None, 12), ("a", 5), ("b", 12), ("c", 12)]:
            free = sum(not self.pins[handle] for handle in self.of(salt))
            if before[salt] <= quota:
                assert not lost[salt], "a tenant within its quota was trimmed"
            else:
                assert len(self.of(salt)) == quota or (len(self.of(salt)) > quota and not free)

    @invariant()
    def the_account_is_right(self) -> None:
        assert len(self.policy) == len(self.order)
        assert self.policy.usage() == {tenant_of_salt(salt): len(self.of(salt)) for salt in SALTS if self.of(salt)}


TestTenants = TenantMachine.TestCase


def test_who_floods_the_tier_evicts_its_own_chunks() -> None:
    """The reason for quotas: one tenant's crawl must not cost another one its cache."""
    policy = policy_of(100, each=50)
    add(policy, list(range(10)), "a")
    add(policy, list(range(10, 100)), "b")
    assert set(policy.evict(80, UNHELD)) <= set(range(10, 100))
    assert policy.usage() == {A: 10, B: 10}


def test_a_tenant_over_its_quota_is_trimmed_though_there_is_room() -> None:
    """A quota holds always, not only under pressure; the coldest chunks are evicted."""
    policy = policy_of(1000, each=4)
    add(policy, list(range(10)), "a")
    policy.touch([0])
    assert policy.trim(UNHELD) == [1, 2, 3, 4, 5, 6]
    assert policy.usage() == {A: 4}
    assert policy.trim(UNHELD) == []


def test_trimming_is_bounded() -> None:
    """A restart with smaller quotas must not stop a step for a million deletions."""
    policy = policy_of(10_000, each=10)
    add(policy, list(range(5000)), "a")
    assert len(policy.trim(UNHELD)) == TRIMMED_MAX


def test_chunks_of_several_sizes_are_counted_by_their_bytes() -> None:
    """Compressed frames have any size, so quotas count bytes, not chunks."""
    policy = TenantPolicy(LruPolicy, Quotas(1000, 100), 60)
    policy.chunk_bytes = lambda handle: 60 if handle % 2 else 10
    add(policy, [0, 1, 2, 3], "a")
    assert policy.usage() == {A: 140}
    assert policy.trim(UNHELD) == [0, 1]
    assert policy.usage() == {A: 70}


def test_held_chunks_stay_and_the_next_tenant_is_asked() -> None:
    """All chunks of the largest tenant may be pinned; then room is taken from another tenant."""
    policy = policy_of(100, each=50)
    add(policy, list(range(40)), "a")
    add(policy, list(range(40, 50)), "b")
    pins = bytearray(50)
    pins[:40] = b"\1" * 40
    assert policy.evict(3, pins) == [40, 41, 42]
    assert policy.evict(8, pins) == []
    assert len(policy) == 47
    assert set(policy.evict(7, pins)) == set(range(43, 50)), "chunks chosen without effect are chosen first"


def test_the_end_of_a_write_is_no_use_for_any_tenant() -> None:
    """Each tenant's policy gets its own chunks, by its own numbers: a chunk passed over is its next victim."""
    policy = policy_of(6)
    add(policy, [0, 2, 4], "a")
    add(policy, [1, 3], "b")
    pins = bytearray([1, 1, 0, 0, 0])
    assert sorted(policy.evict(2, pins)) in ([2, 3], [2, 4])
    policy.release_after_write([0, 1])
    assert policy.evict(1, bytes(5)) in ([0], [1])


def test_more_tenants_than_are_told_apart_share_one_quota() -> None:
    """Salts are set by users: a table of them needs a bound."""
    policy = TenantPolicy(LruPolicy, Quotas(100, 10, tenants_max=3), 1)
    for i in range(50):
        add(policy, [i], f"salt {i}")
    usage = policy.usage()
    assert len(usage) <= 4
    assert usage[OTHERS] >= 46
    assert len(policy.trim(UNHELD)) == usage[OTHERS] - 10


def test_tenants_without_chunks_make_place_for_others() -> None:
    """A service that runs for months sees many salts, few at a time; none may remain without chunks."""
    policy = TenantPolicy(LruPolicy, Quotas(100, 10, tenants_max=4), 1)
    rng = random.Random(5)
    for i in range(500):
        handle = i % 50
        add(policy, [handle], f"salt {i}")
        assert OTHERS not in policy.usage()
        if rng.random() < 0.5:
            policy.remove([handle])
        else:
            assert policy.evict(1, UNHELD) == [handle]
    assert len(policy._tenants) <= 5
    assert len(policy) == 0


def test_a_batch_of_newcomers_keeps_the_bound() -> None:
    """A restart adds chunks of thousands of tenants at once: each tracked tenant has columns of its own."""
    policy = TenantPolicy(LruPolicy, Quotas(10_000, 10, tenants_max=4), 1)
    policy.add(list(range(500)), [key_of(i, f"salt {i}") for i in range(500)])
    assert len(policy.usage()) <= 5
    assert policy.usage()[OTHERS] == 496
    policy.remove(list(range(500)))
    policy.add([0], [key_of(0, "late")])
    assert policy.usage() == {tenant_of_salt("late"): 1}


class Counted(bytearray):
    """Column of holds that counts how often it is read."""

    reads = 0

    def __getitem__(self, at: object) -> int:  # type: ignore[override]  # of one place only
        Counted.reads += 1
        return super().__getitem__(at)  # type: ignore[call-overload,no-any-return]  # passed on


def test_a_choice_looks_at_a_bounded_number_of_chunks() -> None:
    """Promise 2, if most of a tenant's chunks are held: visiting all of them per victim took a tenth of a second.

    Evictable chunks are found in a later call, and another tenant is tried in the same one.
    """
    count = 8 * LOOKS_MAX
    policy = policy_of(2 * count)
    add(policy, list(range(count)), "a")
    add(policy, list(range(count, count + 4)), "b")
    pins = Counted(count + 4)
    pins[: count - 4] = b"\1" * (count - 4)
    Counted.reads = 0
    assert policy.evict(2, pins) == [count, count + 1]
    assert Counted.reads <= 2 * LOOKS_MAX
    assert any(policy.evict(6, pins) for _ in range(100)), "evictable chunks are never found"
    assert policy.usage() == {A: count - 4}


def test_what_was_trimmed_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart with a smaller quota trims for thousands of steps. Free numbers must not be visited."""
    count = 10 * TRIMMED_MAX
    policy = policy_of(2 * count, each=TRIMMED_MAX)
    add(policy, list(range(count)), "a")
    monkeypatch.setattr("tierkv.policies.quotas.LOOKS_MAX", 4 * TRIMMED_MAX)
    trimmed = [len(policy.trim(UNHELD)) for _ in range(9)]
    assert trimmed == [TRIMMED_MAX] * 9
    assert policy.trim(UNHELD) == []


def test_tenants_that_are_not_told_apart_cost_no_walk_over_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places taken, a chunk of a new tenant must not cause a search over all tenants for a free place."""
    policy = TenantPolicy(LruPolicy, Quotas(10_000, 10, tenants_max=4), 1)
    policy.add(list(range(10)), [key_of(i, f"salt {i}") for i in range(10)])
    walks: list[int] = []
    forget = policy._forget_empty

    def counted() -> None:
        walks.append(1)
        forget()

    monkeypatch.setattr(policy, "_forget_empty", counted)
    for i in range(10, 100):
        policy.add([i], [key_of(i, f"salt {i}")])
    assert len(walks) <= 1
    assert policy.usage()[OTHERS] == 96


class Listening(LruPolicy):
    """Policy with both abilities."""

    def __init__(self, chunks_max: int | None = None) -> None:
        super().__init__(chunks_max)
        self.heard: list[str] = []
        self.asked: list[tuple[int, int]] = []

    def observe_request(self, observation: RequestObservation) -> None:
        """Note the request."""
        self.heard.append(observation.request_id)

    def refuse(self, keys: list[Key], free: int) -> list[int]:
        """Refuse chunks with an odd key."""
        self.asked.append((len(keys), free))
        return [i for i, key in enumerate(keys) if key[-5] % 2]


def test_each_tenant_has_a_policy_of_its_own() -> None:
    """Learning from one tenant must not affect another one's chunks; each policy gets the room of its quota."""
    made: list[Listening] = []

    def make(chunks_max: int) -> EvictionPolicy:
        made.append(Listening(chunks_max))
        return made[-1]

    policy = TenantPolicy(make, Quotas(100, 10), 1)
    add(policy, [0, 1, 2], "a")
    add(policy, [3], "b")
    path = (key_of(0, "a"),)
    policy.observe_request(RequestObservation("r1", RequestPhase.ARRIVED, 0.0, (path,), (0,), (1,)))
    assert [one.heard for one in made] == [[], ["r1"], []]
    wanted = [key_of(4, "a"), key_of(5, "b"), key_of(7, "a")]
    assert policy.refuse(wanted, 50) == {i for i, key in enumerate(wanted) if key[-5] % 2}
    assert [one.asked for one in made] == [[], [(2, 7)], [(1, 9)]]


def test_abilities_that_the_policy_lacks_are_lacking() -> None:
    """Abilities are found by name; a wrapper with all of them would make every lookup pay for observations."""
    policy = policy_of(10)
    assert not hasattr(policy, "observe_request")
    assert not hasattr(policy, "refuse")


@pytest.mark.parametrize(("salt", "quota"), [("a", 5), ("b", 7), (None, 7), ("huge", 100)])
def test_named_quotas_come_before_the_common_one(salt: str | None, quota: int) -> None:
    """A tenant may have more than the others, but never more than the tier."""
    quotas = Quotas(100, 7, {A: 5, tenant_of_salt("huge"): 10_000})
    assert quotas.of(tenant_of_salt(salt)) == quota


def test_requests_without_a_salt_are_a_tenant_too() -> None:
    """Otherwise requests without a salt would have no limit."""
    assert tenant_of(make_key(b"hash", 0)) == NO_TENANT
    policy = policy_of(100, each=2)
    add(policy, [0, 1, 2, 3], None)
    assert policy.trim(UNHELD) == [0, 1]


def noted_policies(opened: list[int]) -> Callable[[int], EvictionPolicy]:
    """Open LRU policies, and note for how many chunks."""

    def make(chunks_max: int) -> EvictionPolicy:
        opened.append(chunks_max)
        return LruPolicy(chunks_max)

    return make


def test_a_thousand_tenants_take_no_more_memory_than_some() -> None:
    """A policy has columns for the chunks that it is opened for: if each were for the whole tier, memory would end."""
    opened: list[int] = []
    chunks, tenants = 1_000_000, 1_000
    policy = TenantPolicy(noted_policies(opened), Quotas(chunks), 1)
    for number in range(tenants):
        add(policy, [number], f"tenant {number}")
    assert len(opened) == tenants + 1
    assert sum(opened) < 10 * chunks
    assert min(opened) >= EXPECTED_MIN


def test_a_policy_is_opened_for_its_quota_at_most() -> None:
    """A small quota needs a small policy, and a tenant that outgrows what was expected of it keeps all its chunks."""
    opened: list[int] = []
    policy = TenantPolicy(noted_policies(opened), Quotas(100_000, None, {A: 7}), 1)
    add(policy, [0], "a")
    assert opened == [100_000, 7]
    add(policy, [1], "b")
    many = [*range(2, 60_000)]
    add(policy, many, "b")
    assert opened[2] == 100_000 // 3
    assert policy.usage() == {A: 1, B: 1 + len(many)}
    assert policy.evict(100, UNHELD) == [*range(1, 101)], "the oldest of the tenant with the highest use"
