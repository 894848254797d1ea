"""A plugin's eviction policy, watched: whatever it does, no chunk in use is evicted and nothing reaches the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tierkv.abc import AdmissionPolicy, EvictionPolicy, RequestAwarePolicy, WriteAwarePolicy
from tierkv.metrics.counters import CoreCounters
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation

_OWN = "tierkv.policies."
_KNOWN = b"\x01"


class GuardedPolicy:
    """Passes verbs on until the policy raises or chooses what it must not; then it is asked no more.

    From then on victims are taken in the order of their handles. It can be no order of a policy, for there is nobody
    left who kept one; but every chunk that nobody holds can be evicted, so the tier goes on.

    Args:
        policy: of a plugin.
        tier: its tier, for ``policies_failed``.
        counters: what happened, for metrics.
    """

    sighted: Callable[[RequestObservation], None]
    refuse: Callable[[Sequence[Key], int], Collection[int]]

    def __init__(self, policy: EvictionPolicy, tier: str, counters: CoreCounters) -> None:
        self._policy: EvictionPolicy | None = policy
        self._tier = tier
        self._counters = counters
        self._known = bytearray()
        self._count = 0
        self._hand = 0
        self._put_back = "put_back" if isinstance(policy, WriteAwarePolicy) else "release"
        # Abilities are found by their names, so a policy that lacks one must lack it here.
        if isinstance(policy, RequestAwarePolicy):
            self.sighted = policy.sighted
        if isinstance(policy, AdmissionPolicy):
            self.refuse = self._refuse

    def __len__(self) -> int:
        """How many handles are known, held or not."""
        return self._count

    def _ask(self, verb: str, *args: Any) -> Any:  # noqa: ANN401 - any verb
        """What the policy answers; None if it is not asked any more."""
        if self._policy is None:
            return None
        try:
            return getattr(self._policy, verb)(*args)
        except Exception:  # noqa: BLE001 - a plugin's own code: counted, and not called again
            self._give_up()
            return None

    def _give_up(self) -> None:
        if self._policy is not None:
            self._policy = None
            self._counters.policies_failed[self._tier] += 1

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """See :class:`~tierkv.abc.EvictionPolicy`."""
        self._known.extend(bytes(max(0, max(handles, default=-1) + 1 - len(self._known))))
        for handle in handles:
            self._known[handle] = 1
        self._count += len(handles)
        self._ask("add", handles, keys)

    def touch(self, handles: Sequence[int]) -> None:
        """See :class:`~tierkv.abc.EvictionPolicy`."""
        self._ask("touch", handles)

    def release(self, handles: Sequence[int]) -> None:
        """See :class:`~tierkv.abc.EvictionPolicy`."""
        self._ask("release", handles)

    def put_back(self, handles: Sequence[int]) -> None:
        """See :class:`~tierkv.abc.WriteAwarePolicy`."""
        self._ask(self._put_back, handles)

    def remove(self, handles: Sequence[int]) -> None:
        """See :class:`~tierkv.abc.EvictionPolicy`."""
        self._forget(handles)
        self._ask("remove", handles)

    def _forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._known[handle] = 0
        self._count -= len(handles)

    def evict(self, count: int, holds: Sequence[int]) -> Sequence[int]:
        """See :class:`~tierkv.abc.EvictionPolicy`."""
        victims = self._ask("evict", count, holds)
        if self._policy is not None and not self._is_right(victims, count, holds):
            self._give_up()
        if self._policy is None:
            victims = self._next_unheld(count, holds)
        self._forget(victims)
        return victims  # type: ignore[no-any-return]  # checked one by one

    def _is_right(self, victims: object, count: int, holds: Sequence[int]) -> bool:
        """Whether an answer is none, or as many different handles as asked for, all known and none held."""
        if not isinstance(victims, Sequence) or len(victims) not in (0, count):
            return False
        known, end = self._known, len(self._known)
        right = all(type(h) is int and 0 <= h < end and known[h] and not holds[h] for h in victims)
        return right and len(set(victims)) == len(victims)

    def _next_unheld(self, count: int, holds: Sequence[int]) -> list[int]:
        """The next known handles that nobody holds, going round from where the last choice ended."""
        victims: list[int] = []
        for first, end in ((self._hand, len(self._known)), (0, self._hand)):
            handle = self._known.find(_KNOWN, first, end)
            while handle >= 0 and len(victims) < count:
                if not holds[handle]:
                    victims.append(handle)
                handle = self._known.find(_KNOWN, handle + 1, end)
        if len(victims) < count:
            return []
        self._hand = victims[-1] + 1 if victims else self._hand
        return victims

    def _refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        refused = self._ask("refuse", keys, free)
        return refused if isinstance(refused, Collection) else ()


def guarded(policy: EvictionPolicy, tier: str, counters: CoreCounters) -> EvictionPolicy:
    """The policy, watched unless it is one of tierkv's own, whose tests do the watching."""
    return policy if type(policy).__module__.startswith(_OWN) else GuardedPolicy(policy, tier, counters)
