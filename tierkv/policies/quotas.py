"""Quotas: how much of a tier each tenant may fill, whatever the eviction policy.

Each tenant gets a policy instance of its own, behind one that looks like any other to the tier. Who uses most of what
it may have gives way first, by its own policy's choice; so a tenant that floods the cache evicts its own chunks. One
that is over its quota is trimmed to it even where there is room.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.abc import AdmissionPolicy, EvictionPolicy, RequestAwarePolicy, WriteAwarePolicy
from tierkv.structures.key_table import column, longer
from tierkv.types.keys import NO_TENANT, Key, Tenant, tenant_of
from tierkv.types.observation import RequestObservation

OTHERS = Tenant(b"others")
"""Whoever comes when ``tenants_max`` others are here already: they share one quota."""

TRIMMED_MAX = 256
"""Chunks that one call of :meth:`TenantPolicy.trim` lets go at most: part of a step's work."""

_PART_MAX = 64
"""Victims taken from one tenant before it is asked again who uses most."""

LOOKS_MAX = 16_384
"""Numbers that one choice looks at to find chunks that nobody pins: two milliseconds' work. It goes on there the next
time."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes that tenants may fill in one tier.

    each: every tenant that is not named; None: no limit of its own. named: by tenant. capacity_bytes: the tier's, which
    is what tenants without a limit are measured by. tenants_max: tenants told apart at once.
    """

    capacity_bytes: int
    each: int | None = None
    named: Mapping[Tenant, int] = field(default_factory=dict)
    tenants_max: int = 1024

    def of(self, tenant: Tenant) -> int:
        """How much a tenant may fill."""
        quota = self.named.get(tenant, self.each)
        return self.capacity_bytes if quota is None else min(quota, self.capacity_bytes)


class _Part:
    """One tenant's chunks: its policy knows them by small numbers of its own, ``handles`` has the tier's."""

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
        self.looked = 0  # the number to look at next for one that nobody holds

    def number(self, handle: int) -> int:
        if self.free:
            number = self.free.pop()
            self.handles[number] = handle
            return number
        self.handles.append(handle)
        return len(self.handles) - 1


class _Pins(Sequence[int]):
    """The column of pins, by one tenant's own numbers."""

    def __init__(self, pins: Sequence[int], handles: Sequence[int]) -> None:
        self._pins = pins
        self._handles = handles

    def __getitem__(self, number: int) -> int:  # type: ignore[override]  # no policy asks for a slice of holds
        return self._pins[self._handles[number]]

    def __len__(self) -> int:
        return len(self._handles)


class TenantPolicy:
    """An eviction policy made of one per tenant. See :class:`tierkv.abc.EvictionPolicy`; sans-IO, single-threaded.

    Args:
        make: opens a policy for so many chunks.
        quotas: who may fill how much.
        chunk_bytes_max: no chunk has more.

    Attributes:
        chunk_bytes: gives the bytes of a chunk that is being told of, by its handle; a tier with chunks of several
            sizes sets it.
    """

    observe_request: Callable[[RequestObservation], None]
    refuse: Callable[[Sequence[Key], int], Collection[int]]

    def __init__(
        self,
        make: Callable[[int], EvictionPolicy],
        quotas: Quotas,
        chunk_bytes_max: int,
    ) -> None:
        self._make = make
        self._quotas = quotas
        self.chunk_bytes: Callable[[int], int] = lambda _: chunk_bytes_max
        self._chunk_bytes_max = chunk_bytes_max
        self._parts: dict[Tenant, _Part] = {}
        self._tenants: list[Tenant] = []
        self._tenant_numbers: dict[Tenant, int] = {}
        self._free_tenants: list[int] = []
        self._some_empty = False  # whether there may be tenants without chunks
        self._looks = 0
        self._of = column("I", 0)  # by handle: the number of its tenant
        self._number = column("I", 0)  # by handle: its number there, and one; 0: chosen as a victim, and not taken yet
        self._bytes = column("Q", 0)
        self._spare: dict[int, None] = {}
        self._count = 0
        # Abilities are found by their names, so where the policies lack one it must be lacking here.
        first = self._part(NO_TENANT).policy
        if isinstance(first, RequestAwarePolicy):
            self.observe_request = self._observe_request
        if isinstance(first, AdmissionPolicy):
            self.refuse = self._refuse

    def __len__(self) -> int:
        """How many handles are known, held or not."""
        return self._count

    def usage(self) -> dict[Tenant, int]:
        """Bytes of each tenant that has any."""
        return {tenant: part.used_bytes for tenant, part in self._parts.items() if part.used_bytes}

    # -- tenants -----------------------------------------------------------------------------------------------------

    def _part(self, tenant: Tenant) -> _Part:
        part = self._parts.get(tenant)
        if part is None:
            quota = self._quotas.of(tenant)
            part = self._parts[tenant] = _Part(self._make(max(1, quota // self._chunk_bytes_max)), quota)
            self._some_empty = True
        return part

    def _names(self, keys: Sequence[Key]) -> Iterator[Tenant]:
        """The tenant of each key, as far as tenants are told apart; each has its part."""
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
        """Let go of tenants without chunks. Their numbers are used again: who has none names none."""
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
        """The tenants' own numbers of handles, in their order."""
        found: dict[int, list[int]] = {}
        for handle in handles:
            number = self._number[handle]
            if number:
                found.setdefault(self._of[handle], []).append(number - 1)
        return [(self._parts[self._tenants[tenant]], numbers) for tenant, numbers in found.items()]

    # -- verbs -------------------------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """See :class:`tierkv.abc.EvictionPolicy`."""
        if not handles:
            return
        self._reach(max(handles))
        by_tenant: dict[Tenant, tuple[list[int], list[Key]]] = {}
        for handle, key, tenant in zip(handles, keys, self._names(keys), strict=True):
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
            part.policy.add(numbers, own_keys)
        self._count += len(handles)

    def _reach(self, handle: int) -> None:
        if handle >= len(self._of):
            length = max(handle + 1, len(self._of) + max(4096, len(self._of) // 8))
            self._of, self._number = longer(self._of, length), longer(self._number, length)
            self._bytes = longer(self._bytes, length)

    def touch(self, handles: Sequence[int]) -> None:
        """See :class:`tierkv.abc.EvictionPolicy`."""
        for part, numbers in self._by_part(handles):
            part.policy.touch(numbers)

    def release(self, handles: Sequence[int]) -> None:
        """See :class:`tierkv.abc.EvictionPolicy`."""
        for part, numbers in self._by_part(handles):
            part.policy.release(numbers)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """See :class:`tierkv.abc.WriteAwarePolicy`."""
        for part, numbers in self._by_part(handles):
            part.release_after_write(numbers)

    def remove(self, handles: Sequence[int]) -> None:
        """See :class:`tierkv.abc.EvictionPolicy`."""
        for part, numbers in self._by_part(handles):
            part.policy.remove(numbers)
            for number in numbers:
                self._leave(part, number)
        for handle in handles:
            self._spare.pop(handle, None)
            self._number[handle] = 0
        self._count -= len(handles)

    def _leave(self, part: _Part, number: int) -> int:
        """Let a tenant's number go; the tier's handle."""
        handle = part.handles[number]
        part.used_bytes -= self._bytes[handle]
        part.free.append(number)
        self._number[handle] = 0
        self._some_empty = self._some_empty or not len(part.policy)
        return handle

    # -- victims -----------------------------------------------------------------------------------------------------

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """See :class:`tierkv.abc.EvictionPolicy`."""
        self._looks = LOOKS_MAX
        victims = [handle for handle in self._spare if not pins[handle]][:count]
        asked = dict.fromkeys(part for part in self._parts.values() if len(part.policy))
        while len(victims) < count and asked:
            part = max(asked, key=_use)
            taken = self._take(part, min(count - len(victims), _PART_MAX), pins)
            victims += taken
            if not taken or not len(part.policy):
                del asked[part]
        if len(victims) < count:
            self._spare.update(dict.fromkeys(victims))  # still known here; the first to go when there are enough
            return []
        for handle in victims:
            self._spare.pop(handle, None)
        self._count -= count
        return victims

    def trim(self, pins: Sequence[int]) -> list[int]:
        """Victims of tenants that are over their quotas, at most :data:`TRIMMED_MAX`; they are forgotten."""
        self._looks = LOOKS_MAX
        victims: list[int] = []
        for part in self._parts.values():
            while part.used_bytes > part.quota_bytes and len(victims) < TRIMMED_MAX:
                over = -(-(part.used_bytes - part.quota_bytes) // self._chunk_bytes_max)
                taken = self._take(part, min(over, TRIMMED_MAX - len(victims)), pins)
                if not taken:
                    break
                victims += taken
        self._count -= len(victims)
        return victims

    def _take(self, part: _Part, count: int, pins: Sequence[int]) -> list[int]:
        """Up to ``count`` victims of one tenant: as many as are found that nobody holds."""
        count = self._count_unpinned(part, count, pins)
        numbers = part.policy.evict(count, _Pins(pins, part.handles)) if count else ()
        return [self._leave(part, number) for number in numbers]

    def _count_unpinned(self, part: _Part, count: int, pins: Sequence[int]) -> int:
        """How many of a tenant's chunks nobody pins, counted up to ``count``.

        Looks on from the first one that it found the last time, so what is held or free before it is passed over once.
        """
        handles, numbers = part.handles, self._number
        length = len(handles)
        looks = min(length, -(-self._looks // 2))  # so that there are some left for the next tenant
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
        """A request belongs to one tenant: its policy alone hears of it."""
        key = next((path[0] for path in observation.paths if path), None)
        part = None if key is None else self._parts.get(tenant_of(key), self._parts.get(OTHERS))
        if part is not None and isinstance(part.policy, RequestAwarePolicy):
            part.policy.observe_request(observation)

    def _refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Asks each tenant's policy for its own keys, with the room that its quota leaves it."""
        by_tenant: dict[Tenant, list[int]] = {}
        for position, tenant in enumerate(self._names(keys)):
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
    """Bytes by tenant (in hex; empty: nobody's) in each tier whose policy keeps quotas."""
    kept = {tier: policy for tier, policy in policies if isinstance(policy, TenantPolicy)}
    return {tier: {name.hex(): used for name, used in policy.usage().items()} for tier, policy in kept.items()}


def _use(part: _Part) -> float:
    """How much of what a tenant may have it uses."""
    return part.used_bytes / part.quota_bytes
