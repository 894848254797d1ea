"""Passage of one request: the chunks that it wants, on their way to the GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from tierkv.manager.host.chunk_state import CODES, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.passages.slot_account import SlotUse
from tierkv.manager.step_state import StepState
from tierkv.types.cache_events import HOST
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key

NOT_GRANTED = -1
"""Slot number of a wanted chunk that has none yet."""
FRONT_CHUNKS_MIN = 16
"""Smallest front that is copied while the chunks behind it are being read. Each job costs the engine two steps."""


class Passage:
    """Wanted chunks of one request in prefix order, and the slots granted for them.

    Attributes:
        owner: id of the request.
        asked_s: time since when its lookup is open; see :class:`~tierkv.manager.contract.RequestContext`.
        order: position among all passages; the oldest is first.
        copies: whether its sink is the GPU. Then ``keys`` is the next segment only.
        keys: one per wanted chunk.
        slots: one per wanted chunk, or NOT_GRANTED. A granted slot is held; its chunk is readable or being read.
        num_granted: number of slots that are granted.
        position: every chunk before this one has a slot.
        looked: chunks before this one were held if they were in the host tier when the passage began.
        outstanding: number of granted chunks that are not readable yet.
        arrived: every chunk before this one was readable when :attr:`front` was asked for last.
        promised: whether the engine relies on its chunks, so that none may be taken away.
        missing: chunk that was not readable when it was looked for last; None: none was looked for.
        lacks_host_slots: whether it found no host slot, though the account had room.
        held_back_version: version of the tiers' answers when a tier of unknown speed was found to read for others
            first; None if none does.
        moved_s: time when it was opened, when its turn for slots began, or when one of its chunks moved.
        trusts: whether no wanted chunk has turned out to be unavailable so far.
        failed: whether a wanted chunk turned out to be unavailable: the lookup must be repeated.
    """

    __slots__ = (
        "_host", "_origins", "_reading_s", "_step", "arrived", "asked_s", "copies", "failed", "held_back_version",
        "hints", "keys", "lacks_host_slots", "looked", "missing", "moved_s", "num_granted", "order", "outstanding",
        "owner", "position", "promised", "slots", "trusts",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913, PLR0917 - only Passages makes one
        self,
        owner: str,
        order: int,
        keys: tuple[Key, ...],
        host: HostTier,
        step: StepState,
        hints: RequestHints = NO_HINTS,
        asked_s: float = math.inf,
    ) -> None:
        self.owner = owner
        self.asked_s = asked_s
        self.trusts = True
        self.order = order
        self.hints = hints
        self.copies = False
        self.outstanding = 0
        self._host = host
        self._step = step
        self.moved_s = step.now
        self._reading_s = 0.0
        self._origins: dict[int, str] = {}  # by slot; without those from the host tier
        self.want(keys)

    def want(self, keys: tuple[Key, ...], slots: list[int] | None = None) -> None:
        """Replace the wanted keys. slots: of those that have one already, and keep it; None: none has one."""
        self.keys = keys
        self.slots = [NOT_GRANTED] * len(keys) if slots is None else slots
        self.num_granted = len(keys) - self.slots.count(NOT_GRANTED) if slots else 0
        origins = self._origins if slots else {}
        self._origins = {slot: origins[slot] for slot in self.slots if slot in origins} if origins else {}
        self.position = 0
        self.arrived = 0
        self.looked = 0
        self.failed = False
        self.promised = False
        self.missing: Key | None = None
        self.lacks_host_slots = False
        self.held_back_version: int | None = None

    def replace(self, keys: tuple[Key, ...], *, drops_lost: bool) -> list[int]:
        """Replace the wanted keys. Those that have a slot keep it, lost ones unless it ``drops_lost``.

        Returns:
            Slots of the others, the last wanted one first (S54).
        """
        lost = self._host.slots.in_state(self.slots, ChunkState.DOOMED) if drops_lost and self.num_granted else set()
        lost.discard(NOT_GRANTED)
        count = len(keys)
        if not lost and self.keys[:count] == keys:  # usual: a shorter hit of one group
            dropped = [slot for slot in self.slots[: count - 1 if count else None : -1] if slot != NOT_GRANTED]
            self.want(keys, self.slots[:count])
            return dropped
        slot_of = {key: slot for key, slot in self.slot_of().items() if slot not in lost}
        slots = list(map(slot_of.get, keys, repeat(NOT_GRANTED)))
        kept = set(slots)
        dropped = [slot for slot in self.held_tail_first() if slot not in kept]
        self.want(keys, slots)
        return dropped

    def grant(self, position: int, slot: int, origin: str) -> None:
        """Grant a held slot to the chunk at a position. origin: tier that its bytes come from."""
        self.slots[position] = slot
        self.num_granted += 1
        if origin != HOST:
            self._origins[slot] = origin

    def grant_some(self, positions: Sequence[int], slots: Sequence[int], origin: str) -> None:
        """Grant held slots to the chunks at these positions, which ascend, as :meth:`grant`."""
        first, end = positions[0], positions[-1] + 1
        if end - first == len(slots):  # usual: what is missing is the rest of the prefix
            self.slots[first:end] = slots
        else:
            for position, slot in zip(positions, slots, strict=True):
                self.slots[position] = slot
        self.num_granted += len(slots)
        if origin != HOST:
            self._origins.update(dict.fromkeys(slots, origin))

    def grant_all(self, slots: list[int]) -> None:
        """Grant the held slots of all wanted chunks, which are readable in the host tier."""
        self.slots = slots
        self.num_granted = self.position = self.looked = len(slots)

    def pass_granted(self) -> None:
        """Move the position to the first chunk without a slot."""
        slots = self.slots
        self.position = slots.index(NOT_GRANTED, self.position) if not self.complete else len(slots)

    def grant_next(self, slots: Sequence[int]) -> None:
        """Grant held slots to the chunks behind the front, which has all of the slots that were granted so far."""
        stop = self.looked + len(slots)
        self.slots[self.looked : stop] = slots
        self.num_granted = self.position = self.looked = stop

    def slot_of(self) -> dict[Key, int]:
        """Slot of every chunk that has one."""
        return {key: slot for key, slot in zip(self.keys, self.slots, strict=True) if slot != NOT_GRANTED}

    def granted(self) -> dict[Key, tuple[int, str]]:
        """Slot and source tier of every chunk that has a slot."""
        return {
            key: (slot, self._origins.get(slot, HOST))
            for key, slot in zip(self.keys, self.slots, strict=True)
            if slot != NOT_GRANTED
        }

    def in_order_of(self, keys: tuple[Key, ...]) -> tuple[list[int], list[str]] | None:
        """Slots and sources of ``keys``; None unless they are the wanted ones, in any order, and none is coming."""
        if len(keys) != len(self.keys) or not self.complete or self.outstanding:
            return None
        sources = self.sources()
        if keys == self.keys:  # one group; with several, a load has another order than a lookup
            return self.slots, sources
        slot_of = dict(zip(self.keys, self.slots, strict=True))
        slots = list(map(slot_of.get, keys, repeat(NOT_GRANTED)))
        if NOT_GRANTED in slots:
            return None
        if len(set(sources)) > 1:
            source_of = dict(zip(self.keys, sources, strict=True))
            sources = list(map(source_of.__getitem__, keys))
        return slots, sources

    def take_front(self, keys: tuple[Key, ...]) -> tuple[list[int], list[str]] | None:
        """Take the holds on ``keys`` out. Returns slots and sources; None unless they are the front of those wanted.

        They must be readable. The other wanted chunks stay held, which they all must be, or are still being read.
        """
        count = len(keys)
        if not self.complete or not 0 < count < len(self.keys) or self.keys[:count] != keys:
            return None
        if not self.ready and count > self.front:
            return None
        slots, origins = self.slots[:count], self._origins
        self.keys, self.slots = self.keys[count:], self.slots[count:]
        self.arrived = max(0, self.arrived - count)
        self.num_granted = self.position = self.looked = len(self.keys)
        return slots, [origins.pop(slot, HOST) for slot in slots] if origins else [HOST] * count

    def sources(self) -> list[str]:
        """Source tier of each wanted chunk."""
        origins, count = set(self._origins.values()), len(self.keys)
        if not origins:
            return [HOST] * count
        if len(origins) == 1 and len(self._origins) == count:
            return list(origins) * count
        return list(map(self._origins.get, self.slots, repeat(HOST)))

    def count_sources(self) -> Counter[str]:
        """Number of granted chunks by source tier."""
        counts = Counter(self._origins.values())
        if self.num_granted > len(self._origins):
            counts[HOST] = self.num_granted - len(self._origins)
        return counts

    @property
    def slot_use(self) -> SlotUse:
        """Account on which its slots are counted."""
        return SlotUse.GATHERED if self.copies else SlotUse.HELD

    @property
    def complete(self) -> bool:
        """Whether every wanted chunk has a slot."""
        return self.num_granted == len(self.keys)

    @property
    def num_lacking(self) -> int:
        """Number of wanted chunks that are not readable yet, or have no slot."""
        return len(self.keys) - self.num_granted + self.outstanding

    @property
    def ready(self) -> bool:
        """Whether every wanted chunk is readable and held."""
        return self.complete and not self.outstanding and not self.failed

    @property
    def front(self) -> int:
        """Number of chunks, from the front, that are held and readable. Looks at each chunk once."""
        slots, states, ready = self.slots, self._host.slots.states, CODES[ChunkState.READY]
        at, end = self.arrived, len(slots) if self.complete else self.position
        while at < end and states[slots[at]] == ready:
            at += 1
        self.arrived = at
        return at

    @property
    def early_front(self) -> int:
        """Number of chunks, from the front, that are worth a job while those behind them are being read; 0: none.

        At least half of those wanted: then the rest, for which the engine's blocks wait, takes no longer than that, and
        a passage has few jobs.
        """
        if not self.complete or self.failed or len(self.keys) < FRONT_CHUNKS_MIN:
            return 0
        front = self.front
        return front if front >= max(FRONT_CHUNKS_MIN, len(self.keys) / 2) else 0

    @property
    def is_trusting(self) -> bool:
        """Whether a shared tier that does not answer now counts as having the chunk: its lookup was answered before."""
        return self.copies or (self.trusts and self.asked_s < math.inf)

    @property
    def is_looking(self) -> bool:
        """Whether nothing is being read for it, and not all of its chunks were looked up in the host tier."""
        return not (self.outstanding or self.failed) and self.looked < len(self.keys)

    @property
    def waits_for_slots(self) -> bool:
        """Whether a wanted chunk has no slot, though it is available."""
        return not self.failed and self.num_granted < len(self.keys)

    @property
    def is_held_back(self) -> bool:
        """Whether a tier of unknown speed reads for others first."""
        return self.held_back_version is not None

    @property
    def stays_held_back(self) -> bool:
        """Whether another look for slots would end as the last one did: no tier has answered since."""
        return self.held_back_version == self._step.version and not self.lacks_host_slots

    def hold_back(self) -> None:
        """Note that a tier of unknown speed reads for others first."""
        self.held_back_version = self._step.version

    def granted_ready(self) -> set[Key]:
        """Granted keys whose chunks are readable."""
        slot_of = self.slot_of()
        ready = self._host.slots.in_state(slot_of.values(), ChunkState.READY)
        return {key for key, slot in slot_of.items() if slot in ready}

    def held_tail_first(self) -> list[int]:
        """Slots that were granted, the last wanted one first (S54)."""
        return [slot for slot in reversed(self.slots) if slot != NOT_GRANTED]

    # -- reads under way ---------------------------------------------------------------------------------------------

    def await_chunks(self, count: int) -> None:
        """Wait for ``count`` more chunks that are being read."""
        if count and not self.outstanding:
            self._reading_s -= self._step.now
        self.outstanding += count
        self.moved_s = self._step.now

    def stop_waiting(self, count: int) -> None:
        """Wait for ``count`` chunks less."""
        self.outstanding -= count
        if count and not self.outstanding:
            self._reading_s += self._step.now

    def settled(self, count: int, *, readable: bool) -> None:
        """Accept that ``count`` outstanding chunks became readable, or were dropped (see :class:`Waiter`)."""
        self.stop_waiting(count)
        self.moved_s = self._step.now
        if not readable:
            self.failed = True

    @property
    def delivered_s(self) -> float:
        """Time when the chunks being read moved: of the tier that has delivered nothing for longest, if it is later.

        Chunks of one tier wait in one queue, so a chunk for another request counts too. If none is being read, the
        rest is being copied from the engine for a store, which is no delay of a tier: the present time. For a passage
        that is held back, a chunk from any tier counts.
        """
        origins, delivered_s = self._origins, self._step.delivered_s
        tiers = {origins[slot] for slot in self._host.slots.in_state(origins, ChunkState.PROMOTING)}
        if self.is_held_back and not tiers:
            return max(delivered_s.values(), default=-math.inf)
        moved_s = min((delivered_s.get(tier, self.moved_s) for tier in tiers), default=self._step.now)
        return max(self.moved_s, moved_s)

    def take_reading_s(self) -> float:
        """Seconds since the previous call in which chunks for it were being read."""
        running_since = self._step.now if self.outstanding else 0.0
        taken, self._reading_s = self._reading_s + running_since, -running_since
        return taken
