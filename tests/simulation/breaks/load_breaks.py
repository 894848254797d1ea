"""Breaks of promises about load: deadlines, turns, the account of slots, probes, writes, counters."""

from __future__ import annotations

from typing import Any

from simulation.breaks.registry import Patch, breaks
from simulation.checks.counters import COUNTED
from simulation.checks.heads import HEADS
from simulation.checks.service import ACCOUNT, IN_FULL
from simulation.checks.writes import ONCE
from simulation.engine.kv_memory import WRONG_BYTES
from simulation.world.world import NAMED
from tierkv.dispatch.lanes.ticket import Ticket
from tierkv.dispatch.tier_state import TierState
from tierkv.manager.lower.probe_queue import ProbeQueue
from tierkv.manager.moves.tier_reads import TierReads
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.passages.passage import Passage
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse
from tierkv.policies.prefix_order import PrefixOrder
from tierkv.scheduler.load.stream import Stream
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.lookup.open_lookup import OpenLookup
from tierkv.scheduler.lookup.search import tokens_covered
from tierkv.scheduler.requests.accounting import Accounting
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.tiers.retry import TIMED_OUT
from tierkv.types.geometry import cdiv

PASSAGES = "tierkv.manager.passages"

__all__: list[str] = []  # the registry has all breaks

# -- deadlines -------------------------------------------------------------------------------------------------------


@breaks("silent", IN_FULL)
def a_deadline_counts_silence(patch: Patch) -> None:
    """The time in which nothing is outstanding counts, so a silent or full engine makes requests late."""
    moves: dict[tuple[int, str], tuple[object, float]] = {}

    def is_late(self: Any, owner: str, deadline_s: float) -> bool:
        passage, now_s = self.get(owner), self._step.now
        if passage is None or passage.ready:
            return False
        state = (passage.order, passage.num_granted, passage.outstanding)
        before, since_s = moves.get((id(self), owner), (None, now_s))
        moves[id(self), owner] = state, since_s if state == before else now_s
        return bool(state == before and now_s - since_s >= deadline_s)

    patch.setattr(f"{PASSAGES}.passages.Passages.is_late", is_late)


@breaks("overload", IN_FULL)
def a_deadline_counts_a_queue_that_moves(patch: Patch) -> None:
    """Only the beginning of a passage counts as its progress."""
    begun: dict[tuple[int, int], float] = {}

    def is_late(self: Any, owner: str, deadline_s: float) -> bool:
        passage = self.get(owner)
        if passage is None or passage.ready:
            return False
        return bool(self._step.now - begun.setdefault((id(self), passage.order), self._step.now) >= deadline_s)

    patch.setattr(f"{PASSAGES}.passages.Passages.is_late", is_late)


@breaks("silent", IN_FULL)
def a_lapse_keeps_the_time(patch: Patch) -> None:
    """A lookup that the engine has not repeated for the deadline is late when it is asked again."""
    late = f"{Lookups.__module__}.Lookups._is_late"
    first_asked: dict[tuple[int, str], float] = {}

    def is_late(self: Any, record: Any, _question: Any) -> bool:
        since_s = first_asked.setdefault((id(self), record.ctx.request_id), self.now_s)
        waits = record.state in (RequestState.ASKING, RequestState.GATHERING)
        return waits and self.now_s - since_s >= self._deadline_s

    patch.setattr(late, is_late)


@breaks("silent", IN_FULL, first=160)  # a load is in flight during a silence in one seed of ten
def the_wait_for_a_load_counts_silence(patch: Patch) -> None:
    """A request that waits for the load of another one is late after the deadline, whether or not the engine asks."""
    patch.setattr(
        OpenLookup,
        "is_load_late",
        lambda self, moved_s, now_s, deadline_s: moved_s is not None and now_s - moved_s >= deadline_s,
    )


@breaks("overload", COUNTED)
def the_queue_counts_as_time_of_a_tier(patch: Patch) -> None:
    """The whole deferral is counted as time in which a tier was at work."""
    note = Accounting.note_answered
    patch.setattr(
        Accounting, "note_answered", lambda self, stats, now_s, tier_s: note(self, stats, now_s, float("inf"))
    )


@breaks("hung", COUNTED)
def answers_in_time_count_as_expired(patch: Patch) -> None:
    """Every answer counts as one that the deadline ended."""

    def count(self: Any, record: Any, *, late: bool) -> None:
        self._counters.deadlines_expired += 1

    patch.setattr(Lookups, "_count_deadline", count)


@breaks("tiny-host", COUNTED)
def loads_that_end_early_are_not_counted(patch: Patch) -> None:
    """A streamed load that lacks chunks counts as whole."""
    patch.setattr(Stream, "is_cut", property(lambda self: False))


# -- slots -----------------------------------------------------------------------------------------------------------


@breaks("overload", ACCOUNT)
def what_is_copied_is_not_on_the_account(patch: Patch) -> None:
    released = SlotAccount.released

    def release_others(self: SlotAccount, count: int, use: SlotUse) -> None:
        if use is not SlotUse.COPIED:
            released(self, count, use)

    patch.setattr(SlotAccount, "sent", lambda self, chunks, *, unreserved: None)
    patch.setattr(SlotAccount, "released", release_others)
    patch.setattr(SlotAccount, "validate", lambda self, to_release: None)
    patch.setattr("tierkv.manager.passages.passages.check_account", lambda *_: None)


@breaks("windows", IN_FULL)
def a_hit_is_cut_in_whole_chunks_of_the_largest_size(patch: Patch) -> None:
    """A hit that needs more slots than there are loses chunks of the largest size from its end, until it fits."""

    def covered(groups: Any, computed_tokens: int, tokens_max: int, chunks_max: int) -> int:
        size: int = max(group.chunk_tokens for group in groups)
        fits: int = tokens_covered(groups, computed_tokens, tokens_max, chunks_max)
        return max(computed_tokens, tokens_max - cdiv(tokens_max - fits, size) * size)

    patch.setattr(f"{Lookups.__module__}.tokens_covered", covered)


# -- prompts that do not fit -----------------------------------------------------------------------------------------


@breaks("heads", HEADS)
def chunks_enter_policies_as_they_come(patch: Patch) -> None:
    """The chunks of a prompt have no order in a policy, so that its tail may evict its head."""
    patch.setattr(PrefixOrder, "add", lambda self, handles, keys, ranks=(): self._policy.add(handles, keys))
    patch.setattr(PrefixOrder, "mark", lambda self, handles, ranks: None)


# -- hashes ----------------------------------------------------------------------------------------------------------


@breaks("overload", NAMED)
def repeated_hashes_are_accepted(patch: Patch) -> None:
    """The scheduler accepts a request whose hashes repeat."""
    patch.setattr("tierkv.scheduler.requests.rules.check_hashes", lambda *_: None)


# -- probes ----------------------------------------------------------------------------------------------------------


@breaks("probes", IN_FULL)
def all_that_waits_is_one_probe(patch: Patch) -> None:
    """One probe of all chunks that wait: its deadline passes before the tier has looked at each, and discards all."""

    def take(self: ProbeQueue, keys_max: int) -> list[tuple[Any, ...]]:
        if self._in_flight or not self._waiting:
            return []
        keys = tuple(self._waiting)[:keys_max]
        for key in keys:
            del self._waiting[key]
        self._asked.update(keys)
        self._in_flight += 1
        return [keys]

    patch.setattr(ProbeQueue, "take", take)
    patch.setattr(Ticket, "outcomes_at_deadline", lambda self: (TIMED_OUT,) * len(self.op.keys))


# -- writes ----------------------------------------------------------------------------------------------------------


@breaks("silent", ONCE)
def a_shared_tier_is_not_asked_before_a_write(patch: Patch) -> None:
    """Its chunks are written again once its answers about them have expired."""
    patch.setattr(Cascades, "ask_first", lambda self, tier, chunks, now, *, stored=False: [])


@breaks("silent", COUNTED)
def skipped_writes_count_as_written(patch: Patch) -> None:
    """A chunk that a tier has already counts as written to it."""
    skip = Cascades._skip

    def count(self: Cascades, tier: Any, slot: int) -> None:
        self.count_written(tier, 1)
        skip(self, tier, slot)

    patch.setattr(Cascades, "_skip", count)


# -- early offers ----------------------------------------------------------------------------------------------------


@breaks("calm", WRONG_BYTES)
def chunks_that_are_being_read_are_copied(patch: Patch) -> None:
    """The front of a hit that is offered early counts all chunks but the last one as arrived."""
    patch.setattr(Passage, "front", property(lambda passage: len(passage.slots) - 1))


# -- time ------------------------------------------------------------------------------------------------------------


@breaks("overload", IN_FULL)
def a_deadline_counts_the_queue(patch: Patch) -> None:
    """The deadline of an operation runs from its submission, also while the tier ends other calls."""
    patch.setattr(TierState, "deadline_s", lambda self, ticket: ticket.submitted_s + ticket.op.timeout_s)


@breaks("overload", IN_FULL)
def a_full_queue_refuses_reads(patch: Patch) -> None:
    """Reads are issued although no more of them may wait in the queue of their tier."""
    take = TierReads.take
    patch.setattr(TierReads, "take", lambda self, keys_max, **_: take(self, keys_max, refused_max=1 << 20))
