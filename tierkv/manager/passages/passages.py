"""All passages: which of them gets slots, in which order, and when one is late. Sans-IO."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import CODES, ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.passages.checks import check_account, check_passage
from tierkv.manager.passages.grants import SlotGrants
from tierkv.manager.passages.passage import Passage
from tierkv.manager.passages.pins import Pins
from tierkv.manager.passages.queue import PassageQueue, waiting_in
from tierkv.manager.passages.releases import SlotReleases
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse
from tierkv.manager.step_state import StepState
from tierkv.metrics.watched import WaitingRequests
from tierkv.types.cache_events import HOST
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef


class Passages:
    """Passages and pins by owner. Single-threaded; every call does a bounded number of key operations.

    Args:
        host: the host tier.
        tier_io: reads from lower tiers.
        step: time and budget of the step.
        chunks_max: cap on all slots of passages and pins together.
    """

    def __init__(self, host: HostTier, tier_io: TierIO, step: StepState, chunks_max: int) -> None:
        self.account = SlotAccount(chunks_max)
        """Slots of all passages."""
        self._host = host
        self._tier_io = tier_io
        self._step = step
        self._granting = step.budget.share()
        self._grants = SlotGrants(host, tier_io, self.account, self._granting, step.budget.looks_max)
        self._releases = SlotReleases(host, self.account, step.budget.share())
        self._by_owner: dict[str, Passage] = {}
        self._held_queue = PassageQueue()
        self._copied_queue = PassageQueue()
        self._holders: list[tuple[int, str]] = []  # order and owner of passages that may hold slots, ascending
        self.pins = Pins(host, self.account, self._releases)
        """Single chunks that are held ahead of a passage."""
        self._last_order = 0
        self._short_step = -2

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def owners(self) -> list[str]:
        """Owners of passages, in order of arrival."""
        return list(self._by_owner)

    @property
    def is_idle(self) -> bool:
        """Whether there is no passage, nothing to release, and no shortage."""
        return not (self._by_owner or self.pins or self.is_short) and self._releases.is_idle

    @property
    def hold_chunks_max(self) -> int:
        """Number of chunks that one request can hold at once. Halved while others are copied in segments."""
        return max(1, self.account.hold_chunks_min) if self.account.num_copied else self.account.chunks_max

    @property
    def segment_chunks_max(self) -> int:
        """Chunks that one passage should gather at once while it is copied, so that all can read and copy together."""
        alone = len(self._by_owner) == self.account.num_copied
        limit = self.account.chunks_max if alone else self.account.copy_chunks_min
        return max(1, limit // (2 * max(1, self.account.num_copied)))

    @property
    def is_short(self) -> bool:
        """Whether a request that was asked about, or a store, found no slot in this step or the previous one."""
        return self._step.budget.step - self._short_step <= 1

    def note_shortage(self) -> None:
        """Note that a request that was asked about, or a store, found no slot in this step."""
        self._short_step = self._step.budget.step

    def is_alone(self, owner: str) -> bool:
        """Whether no other request has a passage."""
        return len(self._by_owner) == 1 and owner in self._by_owner

    def get(self, owner: str) -> Passage | None:
        """Passage of an owner; None if it has none."""
        return self._by_owner.get(owner)

    def is_late(self, owner: str, deadline_s: float) -> bool:
        """Whether a tier at work for the owner, or for the one that it waits behind, has moved nothing for a deadline.

        A queue that moves is no delay of a tier. Neither is an engine that is silent or full, or copies slowly.
        """
        passage = self._by_owner.get(owner)
        if passage is None or passage.ready or self._step.is_behind or self._step.now - passage.moved_s < deadline_s:
            return False
        head = self._queue(passage).head
        blocker = passage if passage.outstanding or head is None or head.order > passage.order else head
        if blocker.outstanding or blocker.is_held_back:
            return self._step.now - max(passage.moved_s, blocker.delivered_s) >= deadline_s
        others = self._host.num_slots - self._host.room - self.account.total
        if not (blocker.lacks_host_slots and others > 0):
            return False
        moved_s = max(blocker.moved_s, self._step.answered_s)
        if others <= self._host.slots.fills.num_storing:  # no slot that a tier reads or writes is among them
            moved_s = max(moved_s, self._step.stored_s)
        return self._step.now - moved_s >= deadline_s

    def is_being_held(self, passage: Passage) -> bool:
        """Whether it waits for no tier, but for the budget of further steps, which hold its chunks of the host tier."""
        has_turn = not self._granting.left and len(passage.keys) <= self._grants.together_max
        return passage.is_looking and (has_turn or self._queue(passage).head is passage)

    def is_lost(self, key: Key, ctx: RequestContext) -> bool:
        """Whether a chunk is not in any tier that the request may load from."""
        if self._host.slots.find(key) is not None:
            return False
        return self._tier_io.source_of(key, ctx.hints.load_tiers, trusting=True) is None

    def readable(self, keys: Sequence[Key]) -> set[Key]:
        """Those of ``keys`` whose chunks are readable in the host tier."""
        table = self._host.slots
        states, ready = table.states, CODES[ChunkState.READY]
        slots = table.find_all(keys)
        return {key for key, slot in zip(keys, slots, strict=True) if slot is not None and states[slot] == ready}

    def is_readable(self, key: Key) -> bool:
        """Whether a chunk is readable in the host tier."""
        return bool(self._host.slots.is_readable(key))

    def waiting(self) -> WaitingRequests:
        """Requests that wait for slots or first reads. O(1). Any thread."""
        return waiting_in(self._held_queue, self._copied_queue, self._step.now)

    def take_reading_s(self, owner: str) -> float:
        """Seconds since the previous call in which chunks for the owner were being read."""
        passage = self._by_owner.get(owner)
        return 0.0 if passage is None else passage.take_reading_s()

    def granted(self, owner: str) -> dict[Key, tuple[Chunk, str]]:
        """Snapshots of the owner's granted chunks, each with its source tier."""
        passage, table = self._by_owner.get(owner), self._host.slots
        pairs = {} if passage is None else passage.granted()
        chunks = {key: (table.owner(table.refs([slot])[0]), origin) for key, (slot, origin) in pairs.items()}
        return {key: (chunk, origin) for key, (chunk, origin) in chunks.items() if chunk is not None}

    def count_sources(self, owner: str) -> Counter[str]:
        """Number of the owner's granted chunks by source tier."""
        passage = self._by_owner.get(owner)
        return Counter() if passage is None else passage.count_sources()

    # -- reserving ---------------------------------------------------------------------------------------------------

    def reserve(
        self, owner: str, keys: tuple[Key, ...], hints: RequestHints = NO_HINTS, asked_s: float = math.inf
    ) -> Passage:
        """Reserve ``keys``, in prefix order, and grant as many as the rules and the hints allow now.

        Later steps continue; other keys than before replace the wanted ones. For a passage that is copied, ``keys`` is
        its next segment.

        Returns:
            The owner's passage.
        """
        passage = self._by_owner.get(owner)
        if passage is None:
            self._last_order += 1
            passage = Passage(owner, self._last_order, keys, self._host, self._step, hints, asked_s)
            self._by_owner[owner] = passage
            if self._held_queue.head is None and self._grants.hold_ready(passage, self.account.hold_room()):
                self._holders.append((passage.order, owner))  # the youngest one; none of its chunks had to wait
                return passage
            self._held_queue.update(passage)
        elif passage.failed or (passage.keys is not keys and passage.keys != keys):
            if passage.failed:  # a tier lacks a chunk that it had reported: only later answers count
                passage.asked_s, passage.trusts = asked_s, False
            self._replace(passage, keys, drops_lost=True)
        if passage.waits_for_slots and self._may_take(passage) and self._grant(passage):
            self.note_shortage()
        return passage

    def _queue(self, passage: Passage) -> PassageQueue:
        return self._copied_queue if passage.copies else self._held_queue

    def _may_take(self, passage: Passage) -> bool:
        """Whether no older passage waits for slots, or all wanted chunks are readable, so that no slot is taken."""
        head = self._queue(passage).head
        return head is None or head.order >= passage.order or self._grants.are_readable(passage)

    def _account_room(self, passage: Passage) -> int:
        if passage.copies:
            return self.account.copy_room(holds=len(self._by_owner) > self.account.num_copied or bool(self.pins))
        return self.account.hold_room()

    def _grant(self, passage: Passage) -> bool:
        """Grant slots, as far as the account, the host tier and the step's budget allow.

        The oldest passage that finds none takes them from the youngest, unless the engine relies on that one: otherwise
        two could each hold what the other one lacks.

        Returns:
            Whether it wants more slots than there are.
        """
        if self._queue(passage).starts_turn(passage):
            passage.moved_s = self._step.now  # it waited for others before, not for a tier
        refused = self._grant_free(passage)
        while refused and not passage.copies and self._releases.is_idle and self._held_queue.head is passage:
            younger = self._youngest_holder(passage)
            if younger is None:
                break
            self._stop_holding(younger, younger.held_tail_first())
            younger.want(younger.keys)
            self._held_queue.update(younger)
            refused = self._grant_free(passage)
        return refused

    def _youngest_holder(self, older: Passage) -> Passage | None:
        """Youngest passage behind another one that holds slots which it may lose."""
        holders = self._holders
        while holders:
            passage = self._by_owner.get(holders[-1][1])
            if passage is not None and passage.order == holders[-1][0]:
                if passage.order <= older.order:
                    return None
                if passage.num_granted and not passage.copies and not passage.promised:
                    return passage
            holders.pop()
        return None

    def promise(self, owner: str) -> None:
        """Note that the engine was answered, and relies on the owner's chunks."""
        passage = self._by_owner.get(owner)
        if passage is not None:
            passage.promised = True

    def _grant_free(self, passage: Passage) -> bool:
        """Grant free slots. Returns whether more are wanted than there are."""
        refused = self._grants.grant(passage, self._account_room(passage))
        self._note_state(passage)
        return refused

    def _note_state(self, passage: Passage) -> None:
        """Update the queue of those that wait for slots, and the list of those that hold some."""
        self._queue(passage).update(passage)
        if passage.num_granted and not passage.copies:
            entry = (passage.order, passage.owner)
            at = bisect_left(self._holders, entry)
            if at == len(self._holders) or self._holders[at] != entry:
                self._holders.insert(at, entry)

    # -- handing over ------------------------------------------------------------------------------------------------

    def hand_over(
        self, owner: str, keys: tuple[Key, ...], *, continues: bool = False
    ) -> tuple[list[int], list[str]] | Key:
        """Pass the owner's holds on ``keys`` to a job. :meth:`copied` follows when the job has ended.

        A chunk of the passage that was dropped meanwhile is handed over too: its slot is still held. Chunks
        that the passage does not hold are held now if they are readable.

        Args:
            owner: of the passage.
            keys: chunks to send.
            continues: whether further segments follow. Then the passage stays, in its place, with what it holds behind
                ``keys``, if these are its front. Otherwise it ends.

        Returns:
            Slots and sources; or the first key that is neither held nor readable: then nothing has changed.
        """
        passage = self._by_owner.get(owner)
        handed = None if passage is None else passage.in_order_of(keys)
        if passage is not None and handed is not None:
            (slots, sources), unreserved = handed, 0
            self.account.granted(-len(slots), copies=passage.copies)
            passage.want(())
        elif passage is not None and continues and (front := passage.take_front(keys)) is not None:
            (slots, sources), unreserved = front, 0
            self.account.granted(-len(slots), copies=passage.copies)
        elif passage is None and self.pins.are(owner, keys):
            slots, sources, unreserved = self.pins.hand_over(owner, keys), [HOST] * len(keys), 0
        else:
            held = {key: (slot, HOST) for key, slot in self.pins.of(owner).items()}
            held |= {} if passage is None else passage.granted()
            found = self._grants.hold_again(keys, held)
            if isinstance(found, bytes):
                return found
            (slots, sources), unreserved = found, sum(key not in held for key in keys)
            if passage is not None:
                self._stop_holding(passage, passage.held_tail_first())
                passage.want(())
        self.pins.remove(owner)
        self.account.sent(len(slots), unreserved=unreserved)
        if continues:
            self.begin_to_copy(owner)
        elif passage is not None:
            self._close(passage)
        return slots, sources

    def begin_to_copy(self, owner: str) -> None:
        """Make the GPU the sink of the owner's passage, with what it holds."""
        passage = self._by_owner.get(owner)
        if passage is None:  # its chunks were released, or none was ever held
            passage = self.reserve(owner, ())
        if not passage.copies:
            self._held_queue.remove(passage)
            passage.copies = True
            self.account.begins_to_copy(passage.num_granted)
        self._copied_queue.update(passage)

    def copied(self, leases: list[SlotRef]) -> None:
        """End a job that copied from these slots. They are released in this order, in this step and later ones."""
        self._releases.release(leases, SlotUse.COPIED)

    # -- releasing ---------------------------------------------------------------------------------------------------

    def _replace(self, passage: Passage, keys: tuple[Key, ...], *, drops_lost: bool) -> None:
        """Replace the wanted keys. Chunks that are still wanted stay held, lost ones unless it ``drops_lost``."""
        self._stop_holding(passage, passage.replace(keys, drops_lost=drops_lost))
        self._note_state(passage)

    def shrink(self, owner: str, keys: tuple[Key, ...]) -> None:
        """Release the owner's granted chunks that are not in ``keys``, which must all be granted, also lost ones."""
        passage = self._by_owner.get(owner)
        if passage is not None:
            self._replace(passage, keys, drops_lost=False)

    def release(self, owner: str) -> None:
        """End the owner's passage and pins, if it has any."""
        self.pins.remove(owner)
        passage = self._by_owner.get(owner)
        if passage is not None:
            self._stop_holding(passage, passage.held_tail_first())
            self._close(passage)

    def _close(self, passage: Passage) -> None:
        del self._by_owner[passage.owner]
        self._queue(passage).remove(passage)
        at = bisect_left(self._holders, (passage.order, passage.owner))
        if at < len(self._holders) and self._holders[at][0] == passage.order:
            del self._holders[at]
        self.account.num_copied -= passage.copies

    def release_all(self) -> None:
        """End all passages and pins after a reset. Later steps release their chunks."""
        self._releases.release_later(self._by_owner.values())
        self._by_owner = {}
        self._held_queue, self._copied_queue, self._holders = PassageQueue(), PassageQueue(), []
        self.account.num_copied = 0
        for owner in self.pins.owners:
            self.pins.remove(owner)

    def _stop_holding(self, passage: Passage, slots: list[int]) -> None:
        if passage.outstanding:
            passage.stop_waiting(self._host.waiters.remove(slots, passage))
        self._releases.release(slots, passage.slot_use)

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Release what earlier steps left, and let the oldest passages take slots, asked about or not."""
        self._releases.begin_step()
        if not self._by_owner:
            return
        while (head := self._held_queue.head) is not None and self._granting.left > 0:
            before = head.num_granted
            self._grant(head)
            if head.waits_for_slots and head.num_granted == before:
                return

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check that every granted chunk is held, and that all together stay under the cap.

        Raises:
            InvariantError: a chunk is not held, or the cap is exceeded.
        """
        passages = list(self._by_owner.values())
        check_account(self.account, passages, len(self.pins), self._releases.waiting())
        for passage in passages:
            check_passage(passage, self._host, queued=passage in self._queue(passage))
