"""Quotas of a tier: the bytes that each tenant may fill, with any eviction policy.

Each tenant has a policy instance of its own. One :class:`TenantPolicy` holds them and is the policy of the tier.
Victims come from the tenant with the highest use of its quota, chosen by its own policy. So a tenant that floods the
cache evicts its own chunks. A tenant over its quota is trimmed to it even where the tier has room.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.abc import AdmissionPolicy, EvictionPolicy, PrefixAwarePolicy, RequestAwarePolicy, WriteAwarePolicy
from tierkv.structures.columns import column, grown, longer
from tierkv.types.keys import NO_TENANT, Key, Tenant, tenant_of
from tierkv.types.observation import RequestObservation

OTHERS = Tenant(b"others")
"""Common tenant of all tenants beyond ``tenants_max``. They share one quota."""

TRIMMED_MAX = 256
"""Largest number of chunks that one call of :meth:`TenantPolicy.trim` evicts: part of a step's work."""

EXPECTED_MIN = 1024
"""A policy is opened for that many chunks or more, unless the quota has no room for them. The first tenant is expected
to fill the tier, the second one half of it, and so on: policies for the whole tier each would take its memory many
times. One that gets more chunks grows."""

_PART_MAX = 64
"""Largest number of victims taken from one tenant before use is compared again."""

LOOKS_MAX = 16_384
"""Numbers that one choice scans for unpinned chunks: 2 ms of work. The next choice continues there."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes that tenants may fill in one tier."""

    capacity_bytes: int
    """Capacity of the tier. It is also the quota of tenants without a limit."""
    each: int | None = None
    """Quota of every tenant that is not named; None: no limit."""
    named: Mapping[Tenant, int] = field(default_factory=dict)
    """Quotas by tenant."""
    tenants_max: int = 1024
    """Largest number of tenants that are tracked at once."""

    def of(self, tenant: Tenant) -> int:
        """Quota of a tenant in bytes."""
        quota = self.named.get(tenant, self.each)
        return self.capacity_bytes if quota is None else min(quota, self.capacity_bytes)


class _Part:
    """Chunks of one tenant. Its policy knows them by small numbers; ``handles`` has the tier's handle by number."""

    __slots__ = ("free", "handles", "looked", "policy", "quota_bytes", "release_after_write", "used_bytes")

    def __init__(self, policy: EvictionPolicy, quota_bytes: int) -> None:
        self.policy = policy
        self.release_after_write = (
            policy.release_after_write if isinstance(policy, WriteAwarePolicy) else policy.release
        )
        self.quota_bytes = max(1, quota_bytes)
        self.used_bytes = 0
        self.handles = array("I")
        self.free = array("I")
        self.looked = 0  # next number to scan for an unpinned chunk

    def number(self, handle: int) -> int:
        if self.free:
            number = self.free.pop()
            self.handles[number] = handle
            return number
        self.handles.append(handle)
        return len(self.handles) - 1


class _Pins(Sequence[int]):
    """Column of pins, by the numbers of one tenant."""

    def __init__(self, pins: Sequence[int], handles: Sequence[int]) -> None:
        self._pins = pins
        self._handles = handles

    def __getitem__(self, number: int) -> int:  # type: ignore[override]  # no policy takes a slice of pins
        return self._pins[self._handles[number]]

    def __len__(self) -> int:
        return len(self._handles)


class TenantPolicy:
    """Eviction policy that holds one policy per tenant. Sans-IO and single-threaded.

    Args:
        make: opens a policy for a number of chunks.
        quotas: quotas of the tenants.
        chunk_bytes_max: size of the largest chunk in bytes.
    """

    observe_request: Callable[[RequestObservation], None]
    refuse: Callable[[Sequence[Key], int], Collection[int]]
    add_behind: Callable[[Sequence[int], Sequence[Key], int], None]
    evict_before: Callable[[int, Sequence[int], int], Sequence[int]]

    def __init__(
        self,
        make: Callable[[int], EvictionPolicy],
        quotas: Quotas,
        chunk_bytes_max: int,
    ) -> None:
        self._make = make
        self._quotas = quotas
        self.chunk_bytes: Callable[[int], int] = lambda _: chunk_bytes_max
        """Size in bytes of a chunk that is being added, by its handle. A tier with chunks of several sizes sets it."""
        self._chunk_bytes_max = chunk_bytes_max
        self._parts: dict[Tenant, _Part] = {}
        self._tenants: list[Tenant] = []
        self._tenant_numbers: dict[Tenant, int] = {}
        self._free_tenants: list[int] = []
        self._some_empty = False  # whether some tenants may have no chunks
        self._looks = 0
        self._of = column("I", 0)  # by handle: number of its tenant
        self._number = column("I", 0)  # by handle: 1 + its number there; 0: a victim that is not returned yet
        self._bytes = column("Q", 0)
        self._spare: dict[int, None] = {}
        self._count = 0
        # Abilities are found by method name, so this policy must lack those that the tenants' policies lack.
        first = self._part(NO_TENANT).policy
        if isinstance(first, RequestAwarePolicy):
            self.observe_request = self._observe_request
        if isinstance(first, AdmissionPolicy):
            self.refuse = self._refuse
        if isinstance(first, PrefixAwarePolicy):
            self.add_behind, self.evict_before = self._add_behind, self._evict_before

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._count

    def usage(self) -> dict[Tenant, int]:
        """Bytes of each tenant that has chunks."""
        return {tenant: part.used_bytes for tenant, part in self._parts.items() if part.used_bytes}

    # -- tenants -----------------------------------------------------------------------------------------------------

    def _part(self, tenant: Tenant) -> _Part:
        part = self._parts.get(tenant)
        if part is None:
            quota = self._quotas.of(tenant)
            expected = max(EXPECTED_MIN, self._quotas.capacity_bytes // (1 + len(self._parts)) // self._chunk_bytes_max)
            policy = self._make(max(1, min(expected, quota // self._chunk_bytes_max)))
            part = self._parts[tenant] = _Part(policy, quota)
            self._some_empty = True
        return part

    def _tenants_of(self, keys: Sequence[Key]) -> Iterator[Tenant]:
        """Yield the tenant of each key, or :data:`OTHERS`. Each yielded tenant has a part."""
        tenants_max = self._quotas.tenants_max
        if self._some_empty and len(self._parts) + len(keys) > tenants_max:
            self._forget_empty()
        for key in keys:
            tenant = tenant_of(key)
            if tenant not in self._parts:
                tenant = tenant if len(self._parts) < tenants_max else OTHERS
                self._part(tenant)
            yield tenant

    def _forget_empty(self) -> None:
        """Drop tenants without chunks. Their numbers may be reused, because no handle refers to them."""
        self._some_empty = False
        for tenant in [tenant for tenant, part in self._parts.items() if not len(part.policy)]:
            del self._parts[tenant]
            if (number := self._tenant_numbers.pop(tenant, None)) is not None:
                self._free_tenants.append(number)

    def _tenant_number(self, tenant: Tenant) -> int:
        number = self._tenant_numbers.get(tenant)
        if number is None:
            if not self._free_tenants:
                self._free_tenants.append(len(self._tenants))
                self._tenants.append(tenant)
            number = self._tenant_numbers[tenant] = self._free_tenants.pop()
            self._tenants[number] = tenant
        return number

    def _part_of(self, handle: int) -> _Part:
        return self._parts[self._tenants[self._of[handle]]]

    def _by_part(self, handles: Iterable[int]) -> list[tuple[_Part, list[int]]]:
        """Numbers of the handles by tenant, in the order of the handles."""
        found: dict[int, list[int]] = {}
        for handle in handles:
            number = self._number[handle]
            if number:
                found.setdefault(self._of[handle], []).append(number - 1)
        return [(self._parts[self._tenants[tenant]], numbers) for tenant, numbers in found.items()]

    # -- verbs -------------------------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Add chunks to the policies of their tenants."""
        self._add_behind(handles, keys, None)

    def _add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int | None) -> None:
        """Add chunks; those of the tenant of ``behind`` are evicted before it. None: no chunk is before them."""
        if not handles:
            return
        self._grow_to(max(handles))
        by_tenant: dict[Tenant, tuple[list[int], list[Key]]] = {}
        for handle, key, tenant in zip(handles, keys, self._tenants_of(keys), strict=True):
            numbers, own_keys = by_tenant.setdefault(tenant, ([], []))
            numbers.append(handle)
            own_keys.append(key)
        for tenant, (own, own_keys) in by_tenant.items():
            part, tenant_number = self._part(tenant), self._tenant_number(tenant)
            numbers = []
            for handle in own:
                number = part.number(handle)
                size = self.chunk_bytes(handle)
                self._of[handle], self._number[handle], self._bytes[handle] = tenant_number, number + 1, size
                part.used_bytes += size
                numbers.append(number)
            if behind is not None and isinstance(part.policy, PrefixAwarePolicy) and self._part_of(behind) is part:
                part.policy.add_behind(numbers, own_keys, self._number[behind] - 1)
            else:
                part.policy.add(numbers, own_keys)
        self._count += len(handles)

    def _grow_to(self, handle: int) -> None:
        if handle >= len(self._of):
            length = grown(len(self._of), handle + 1)
            self._of, self._number = longer(self._of, length), longer(self._number, length)
            self._bytes = longer(self._bytes, length)

    def touch(self, handles: Sequence[int]) -> None:
        """Note a use of chunks."""
        for part, numbers in self._by_part(handles):
            part.policy.touch(numbers)

    def release(self, handles: Sequence[int]) -> None:
        """Note the end of the last pin of chunks."""
        for part, numbers in self._by_part(handles):
            part.policy.release(numbers)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Note the end of writes to lower tiers."""
        for part, numbers in self._by_part(handles):
            part.release_after_write(numbers)

    def remove(self, handles: Sequence[int]) -> None:
        """Remove chunks that left for another reason."""
        for part, numbers in self._by_part(handles):
            part.policy.remove(numbers)
            for number in numbers:
                self._free_number(part, number)
        for handle in handles:
            self._spare.pop(handle, None)
            self._number[handle] = 0
        self._count -= len(handles)

    def _free_number(self, part: _Part, number: int) -> int:
        """Free the number of a tenant's chunk and return the tier's handle."""
        handle = part.handles[number]
        part.used_bytes -= self._bytes[handle]
        part.free.append(number)
        self._number[handle] = 0
        self._some_empty = self._some_empty or not len(part.policy)
        return handle

    # -- victims -----------------------------------------------------------------------------------------------------

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Choose victims from the tenants with the highest use of their quotas."""
        victims = self._choose(count, pins, None)
        if len(victims) < count:
            self._spare.update(dict.fromkeys(victims))  # still known here; the next choice takes them first
            return []
        return self._given(victims)

    def _evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Choose victims as :meth:`evict`, until the tenant of ``stop`` has no other victim before it."""
        return self._given(self._choose(count, pins, stop))

    def _given(self, victims: list[int]) -> list[int]:
        for handle in victims:
            self._spare.pop(handle, None)
        self._count -= len(victims)
        return victims

    def _choose(self, count: int, pins: Sequence[int], stop: int | None) -> list[int]:
        self._looks = LOOKS_MAX
        stopping = None if stop is None or not self._number[stop] else self._part_of(stop)
        victims = [handle for handle in self._spare if not pins[handle]][:count]
        asked = dict.fromkeys(part for part in self._parts.values() if len(part.policy))
        while len(victims) < count and asked:
            part = max(asked, key=_use)
            wanted = min(count - len(victims), _PART_MAX)
            taken = self._take(part, wanted, pins, stop if part is stopping else None)
            victims += taken
            if part is stopping and len(taken) < wanted:
                break
            if not taken or not len(part.policy):
                del asked[part]
        return victims

    def trim(self, pins: Sequence[int], victims_max: int = TRIMMED_MAX) -> list[int]:
        """Forget and return victims of tenants over their quotas, at most ``victims_max``."""
        self._looks = LOOKS_MAX
        victims: list[int] = []
        for part in self._parts.values():
            while part.used_bytes > part.quota_bytes and len(victims) < victims_max:
                over = -(-(part.used_bytes - part.quota_bytes) // self._chunk_bytes_max)
                taken = self._take(part, min(over, victims_max - len(victims)), pins)
                if not taken:
                    break
                victims += taken
        self._count -= len(victims)
        return victims

    def _take(self, part: _Part, count: int, pins: Sequence[int], stop: int | None = None) -> list[int]:
        """Return up to ``count`` victims of one tenant, as many as unpinned chunks are found; those before ``stop``."""
        count = self._count_unpinned(part, count, pins)
        own_pins = _Pins(pins, part.handles)
        if stop is not None and isinstance(part.policy, PrefixAwarePolicy):
            numbers = part.policy.evict_before(count, own_pins, self._number[stop] - 1)
        else:
            numbers = part.policy.evict(count, own_pins) if count else ()
        return [self._free_number(part, number) for number in numbers]

    def _count_unpinned(self, part: _Part, count: int, pins: Sequence[int]) -> int:
        """Number of unpinned chunks of a tenant, counted up to ``count``.

        Continues at the first chunk that the previous call found. So pinned and free numbers are passed over once.
        """
        handles, numbers = part.handles, self._number
        length = len(handles)
        looks = min(length, -(-self._looks // 2))  # some remain for the next tenant
        found, number, first = 0, part.looked, -1
        while looks and found < count:
            number = number if number < length else 0
            handle = handles[number]
            if numbers[handle] == number + 1 and not pins[handle] and self._part_of(handle) is part:
                found += 1
                first = number if first < 0 else first
            number += 1
            looks -= 1
            self._looks -= 1
        part.looked = number if first < 0 else first
        return found

    # -- abilities ---------------------------------------------------------------------------------------------------

    def _observe_request(self, observation: RequestObservation) -> None:
        """Pass an observation to the policy of the request's tenant."""
        key = next((path[0] for path in observation.paths if path), None)
        part = None if key is None else self._parts.get(tenant_of(key), self._parts.get(OTHERS))
        if part is not None and isinstance(part.policy, RequestAwarePolicy):
            part.policy.observe_request(observation)

    def _refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Ask the policy of each tenant about its keys, with the room within its quota."""
        by_tenant: dict[Tenant, list[int]] = {}
        for position, tenant in enumerate(self._tenants_of(keys)):
            by_tenant.setdefault(tenant, []).append(position)
        refused: set[int] = set()
        for tenant, positions in by_tenant.items():
            part = self._part(tenant)
            room = min(free, max(0, part.quota_bytes - part.used_bytes) // self._chunk_bytes_max)
            if isinstance(part.policy, AdmissionPolicy):
                own = [keys[position] for position in positions]
                refused.update(positions[i] for i in part.policy.refuse(own, room))
        return refused


def usage_by_tier(policies: Iterable[tuple[str, EvictionPolicy]]) -> dict[str, dict[str, int]]:
    """Used bytes by tenant (in hex; empty: no tenant), for each tier whose policy keeps quotas."""
    kept = {tier: policy for tier, policy in policies if isinstance(policy, TenantPolicy)}
    return {tier: {name.hex(): used for name, used in policy.usage().items()} for tier, policy in kept.items()}


def _use(part: _Part) -> float:
    """Fraction of the quota that a tenant uses."""
    return part.used_bytes / part.quota_bytes
