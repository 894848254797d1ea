"""Guard around the eviction policy of a plugin. The policy's faults never evict a pinned chunk nor reach the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from tierkv.abc import AdmissionPolicy, EvictionPolicy, PrefixAwarePolicy, RequestAwarePolicy, WriteAwarePolicy
from tierkv.metrics.counters import CoreCounters
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation

_KNOWN = b"\x01"


class GuardedPolicy:
    """Eviction policy that forwards every verb to a plugin's policy until that fails.

    A policy fails when it raises, or when it returns wrong victims. It is not called again. From then on, victims are
    taken in the order of their handles, because no other order is known. Every unpinned chunk stays evictable, so the
    tier keeps working.

    The built-in policies run without a guard: the tests of the project check them, and a guard costs time.

    Args:
        policy: policy of a plugin.
        tier: name of the tier, for the counter.
        counters: ``policies_failed`` counts the failure, by tier.
    """

    observe_request: Callable[[RequestObservation], None]
    """Verb of :class:`~tierkv.abc.RequestAwarePolicy`; set only where the policy has it."""
    refuse: Callable[[Sequence[Key], int], Collection[int]]
    """Verb of :class:`~tierkv.abc.AdmissionPolicy`; set only where the policy has it."""
    add_behind: Callable[[Sequence[int], Sequence[Key], int], None]
    """Verb of :class:`~tierkv.abc.PrefixAwarePolicy`; set only where the policy has it."""
    evict_before: Callable[[int, Sequence[int], int], Sequence[int]]
    """Verb of :class:`~tierkv.abc.PrefixAwarePolicy`; set only where the policy has it."""

    def __init__(self, policy: EvictionPolicy, tier: str, counters: CoreCounters) -> None:
        self._policy: EvictionPolicy | None = policy
        self._tier = tier
        self._counters = counters
        self._known = bytearray()
        self._count = 0
        self._hand = 0
        self._release_after_write = "release_after_write" if isinstance(policy, WriteAwarePolicy) else "release"
        # Abilities are found by method name, so the guard must lack those that the policy lacks.
        if isinstance(policy, RequestAwarePolicy):
            self.observe_request = policy.observe_request
        if isinstance(policy, AdmissionPolicy):
            self.refuse = self._refuse
        if isinstance(policy, PrefixAwarePolicy):
            self.add_behind, self.evict_before = self._add_behind, self._evict_before

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._count

    def _call(self, verb: str, *args: Any) -> Any:  # noqa: ANN401 - any verb
        """Call a verb of the policy; None if the policy has failed."""
        if self._policy is None:
            return None
        try:
            return getattr(self._policy, verb)(*args)
        except KeyboardInterrupt:  # the user's
            raise
        except BaseException:  # noqa: BLE001 - a plugin's own code, which may panic: counted, and not called again
            self._give_up()
            return None

    def _give_up(self) -> None:
        if self._policy is not None:
            self._policy = None
            self._counters.policies_failed[self._tier] += 1

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Add new chunks (:class:`~tierkv.abc.EvictionPolicy`)."""
        self._note(handles)
        self._call("add", handles, keys)

    def _add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        self._note(handles)
        self._call("add_behind", handles, keys, behind)

    def _note(self, handles: Sequence[int]) -> None:
        self._known.extend(bytes(max(0, max(handles, default=-1) + 1 - len(self._known))))
        for handle in handles:
            self._known[handle] = 1
        self._count += len(handles)

    def touch(self, handles: Sequence[int]) -> None:
        """Note a use (:class:`~tierkv.abc.EvictionPolicy`)."""
        self._call("touch", handles)

    def release(self, handles: Sequence[int]) -> None:
        """Note the end of the last pin (:class:`~tierkv.abc.EvictionPolicy`)."""
        self._call("release", handles)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Note the end of a write to a lower tier (:class:`~tierkv.abc.WriteAwarePolicy`)."""
        self._call(self._release_after_write, handles)

    def remove(self, handles: Sequence[int]) -> None:
        """Remove chunks that left for another reason (:class:`~tierkv.abc.EvictionPolicy`)."""
        self._forget(handles)
        self._call("remove", handles)

    def _forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._known[handle] = 0
        self._count -= len(handles)

    def evict(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Choose victims (:class:`~tierkv.abc.EvictionPolicy`); check those that the policy chose."""
        return self._checked(self._call("evict", count, pins), (0, count), pins)

    def _evict_before(self, count: int, pins: Sequence[int], stop: int) -> Sequence[int]:
        return self._checked(self._call("evict_before", count, pins, stop), range(count + 1), pins)

    def _checked(self, victims: object, lengths: Sequence[int], pins: Sequence[int]) -> Sequence[int]:
        """Forget the victims of the policy; if they are wrong, take others and give up the policy."""
        if self._policy is not None and not self._is_valid(victims, lengths, pins):
            self._give_up()
        if self._policy is None:
            victims = self._next_unpinned(lengths[-1], pins)
        chosen = cast("Sequence[int]", victims)  # checked one by one
        self._forget(chosen)
        return chosen

    def _is_valid(self, victims: object, lengths: Sequence[int], pins: Sequence[int]) -> bool:
        """Whether the victims are different handles, all known and unpinned, and their number is one of ``lengths``."""
        if not isinstance(victims, Sequence) or len(victims) not in lengths:
            return False
        known, end = self._known, len(self._known)
        valid = all(type(h) is int and 0 <= h < end and known[h] and not pins[h] for h in victims)
        return valid and len(set(victims)) == len(victims)

    def _next_unpinned(self, count: int, pins: Sequence[int]) -> list[int]:
        """Next known unpinned handles in cyclic order, starting where the previous choice ended."""
        victims: list[int] = []
        for first, end in ((self._hand, len(self._known)), (0, self._hand)):
            handle = self._known.find(_KNOWN, first, end)
            while handle >= 0 and len(victims) < count:
                if not pins[handle]:
                    victims.append(handle)
                handle = self._known.find(_KNOWN, handle + 1, end)
        if len(victims) < count:
            return []
        self._hand = victims[-1] + 1 if victims else self._hand
        return victims

    def _refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        refused = self._call("refuse", keys, free)
        return refused if isinstance(refused, Collection) else ()
