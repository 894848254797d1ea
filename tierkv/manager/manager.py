"""The offload manager: the one object through which scheduler and stack use this package.

It starts no thread, reads no clock and opens no file. Time is an argument of :meth:`OffloadManager.begin_step`, once
per step. All calls are made on the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tierkv.abc import EvictionPolicy
from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import LoadGrant, RequestContext, ResetScope, StoreGrant
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk_state import ChunkEvent
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.passages.passages import Passages
from tierkv.manager.read_costs import ReadCosts
from tierkv.manager.step_budget import STEP_KEYS_MAX
from tierkv.manager.step_state import StepState
from tierkv.manager.touches import Touches
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.request_feed import RequestFeed
from tierkv.types.cache_events import HOST, CacheEvent, CacheEventKind
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.observation import RequestObservation
from tierkv.types.tier_ops import TierOp, TierReport
from tierkv.types.transfers import SlotRef

PREFIX_BLOCK_KEYS = 32
"""Keys of the first block of a prefix that is looked up. Each further block is twice as long."""


class OffloadManager:
    """Answers existence, grants stores and loads, and moves chunks between tiers.

    Args:
        host: the host tier.
        tiers: lower tiers, fastest first.
        group_bytes: bytes of one chunk of each group.
        reserved_chunks_max: slots that waiting requests may hold together.
        counters: event counts, for metrics.
        step_keys_max: key operations per step.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the composition root hands everything in
        self,
        host: HostTier,
        tiers: Iterable[LowerTier],
        group_bytes: Sequence[int],
        reserved_chunks_max: int,
        counters: CoreCounters,
        step_keys_max: int = STEP_KEYS_MAX,
    ) -> None:
        self.counters = counters
        self.found_below = 0
        """Number of lookups whose chunk would have to be read. Callers compare it before and after their lookups."""
        self._host, self.fills = host, host.slots.fills
        self.store_chunks_max = max(1, host.num_slots // 4)
        """Number of chunks to offer in one ``prepare_store``: a quarter of the host tier, so no store flushes it."""
        self.tiers = TierList(tiers)
        """Lower tiers in service, in the order in which they are searched; also by number."""
        self._events = EventLog(counters)
        self.step = StepState(step_keys_max)
        """Time of the step, and of the latest answers of tiers."""
        self.budget = self.step.budget
        """Key operations of the current step; each part of scheduler and manager has a share."""
        self._freeing = self.budget.share()
        self._touches = Touches(host, self.tiers, self.present_prefix, self.budget.share())
        self._tier_io = TierIO(self.step, host, self.tiers, group_bytes, self._events, counters)
        self.retention, self.forgetting = self._tier_io.retention, self._tier_io.forgetting
        self._admissions, self._in_flight = self._tier_io.admissions, self._tier_io.in_flight
        self._request_feed = RequestFeed(self.policies, counters)
        self.passages = Passages(host, self._tier_io, self.step, reserved_chunks_max)
        """Chunks of hits on their way to the GPU."""
        self.read_costs = ReadCosts(self.step, host, self.tiers, self._tier_io)
        """Costs of reads from lower tiers."""

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Begin an engine step: set the time, and do a bounded part of the background work."""
        self.step.now = now
        self.budget.begin_step()
        self.passages.begin_step()
        if self._touches.num_waiting:
            self._touches.begin_step()
        self._drop_some()
        self._tier_io.sweep()

    def set_time(self, now: float) -> None:
        """Set the time, in seconds on the stack's clock, that holds until the next call."""
        self.step.now = now

    def on_completion(self, completion: TierReport) -> None:
        """Apply a report of dispatch."""
        self._in_flight.on_completion(completion)

    def take_ops(self) -> list[TierOp]:
        """Take the instructions that dispatch must start now. Reads come before writes."""
        return self._tier_io.take_ops()

    def can_wait(self) -> bool:
        """Whether nothing waits for a tier, so that a few steps may pass without :meth:`begin_step`."""
        return self.passages.is_idle and not self._touches.num_waiting and self._tier_io.can_wait()

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Names of all tiers, the host tier first."""
        return (HOST, *(tier.name for tier in self.tiers))

    @property
    def version(self) -> int:
        """Grows when a tier answers, when its health changes, and when a chunk is lost; see :class:`StepState`."""
        return self.step.version

    # -- existence ---------------------------------------------------------------------------------------------------

    def allows_all(self, ctx: RequestContext) -> bool:
        """Whether every readable chunk is a HIT for a request: no hint names tiers, and no chunk expires."""
        return ctx.hints.load_tiers is None and not self.retention.has_lifetimes

    def resident_prefix(self, keys: Sequence[Key], start: int, stop: int, ctx: RequestContext | None = None) -> int:
        """Number of leading ``keys[start:stop]`` that are readable in the host tier and allowed by the hints."""
        count = len(self._host.slots.ready_prefix(tuple(keys[start:stop])))
        if ctx is not None and not self.allows_all(ctx):
            for i in range(start, start + count):
                if self.lookup(keys[i], ctx) is not LookupResult.HIT:
                    return i - start
        return count

    def present_prefix(self, keys: Sequence[Key], start: int, stop: int, ctx: RequestContext) -> int:
        """Number of leading ``keys[start:stop]`` that :meth:`lookup` answers with HIT or PENDING. Queues no probe."""
        first, size = start, PREFIX_BLOCK_KEYS
        if self.allows_all(ctx):
            first += len(self._host.slots.ready_prefix(tuple(keys[start:stop])))  # kept for a passage of them
        while first < stop:
            block = keys[first : min(first + size, stop)]
            known = self._present_in(block, ctx)
            first += known
            if known < len(block):
                break
            size *= 2
        return first - start

    def _present_in(self, keys: Sequence[Key], ctx: RequestContext) -> int:
        """Number of leading ``keys`` that are present."""
        allowed, table = ctx.hints.load_tiers, self._host.slots
        wanted = self.retention.unexpired_prefix(keys, self.step.now)
        slots = table.find_all(wanted)
        if slots.count(None) == len(slots):  # usual where the host tier has no more of a prompt
            self.found_below += (count := self._tier_io.prefix_below(wanted, allowed, since=ctx.asked_s))
            return count
        below = [i for i, at in enumerate(slots) if at is None or not (allowed is None or self._may_hit(at, allowed))]
        found = self._tier_io.prefix_below([wanted[i] for i in below], allowed, since=ctx.asked_s) if below else 0
        count = below[found] if found < len(below) else len(wanted)
        self.found_below += table.fills.num_missing(slots[:count])
        return count

    def _may_hit(self, slot: int, allowed: Collection[str]) -> bool:
        """Whether the chunk in a slot may be a hit, for a request that names the tiers which hits come from."""
        table = self._host.slots
        return HOST in allowed and (slot not in table.fills or table.fills.source(slot) in allowed)

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        """Whether a chunk is in a tier that the request's hints allow. Moves nothing.

        Returns:
            HIT or MISS; PENDING while I/O fills its slot; RETRY if a shared tier has to be probed, which is queued.
        """
        if self.retention.has_ever_expiring and self.retention.is_expired(key, self.step.now):
            return LookupResult.MISS
        allowed = ctx.hints.load_tiers
        ready = self._host.slots.is_readable(key)
        if ready is None:
            answer = self._tier_io.presence(key, allowed, ctx.asked_s)
            self.found_below += answer is LookupResult.HIT
            return answer
        if allowed is not None and not (HOST in allowed and (ready or self._host.slots.origin_of(key) in allowed)):
            answer = self._tier_io.presence(key, allowed, ctx.asked_s)
            if answer is not LookupResult.HIT:
                return answer
        self.found_below += not ready
        return LookupResult.HIT if ready else LookupResult.PENDING

    # -- observations ------------------------------------------------------------------------------------------------

    @property
    def wants_observations(self) -> bool:
        """Whether the policy of any tier subscribes to :meth:`observe_request`."""
        return self._request_feed.has_subscribers

    def observe_request(self, observation: RequestObservation) -> None:
        """Report to the policies of all tiers that a request arrived or finished."""
        self._request_feed.publish(observation)

    # -- loads -------------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext, *, continues: bool = False) -> LoadGrant:
        """Hold the slots of readable chunks for a load job.

        A chunk of the request's passage that was dropped meanwhile is granted too: its slot is still held, and the
        worker's check decides whether its bytes are good.

        Args:
            keys: chunks to load.
            ctx: of the request.
            continues: whether further segments follow. Otherwise the request's passage ends.

        Raises:
            EngineProtocolError: a chunk is neither held nor readable (S16); nothing was changed.
        """
        handed = self.passages.hand_over(ctx.request_id, tuple(keys), continues=continues)
        if isinstance(handed, bytes):
            chunk = self._host.slots.get(handed)
            state = "absent" if chunk is None else chunk.state.value
            raise EngineProtocolError(
                f"request {ctx.request_id!r} cannot load chunk {handed.hex()}: it is {state}; load only what "
                "get_num_new_matched_tokens answered",
                key=handed,
            )
        slots, sources = handed
        self._tier_io.used(slots, ctx.hints)
        return LoadGrant(tuple(keys), self._host.slots.refs(slots), tuple(sources))

    def complete_load(self, slots: Sequence[SlotRef], damaged: Sequence[SlotRef] = ()) -> None:
        """End a load, and drop its ``damaged`` chunks, whose check failed, in order: of many, some in later steps."""
        self.counters.chunks_loaded += len(slots) - len(damaged)
        if damaged:
            self._host.dropping.drop_later([*damaged][::-1])
            self._drop_some()
        self.passages.copied([*slots][::-1])  # tail first: the head stays longest (S54)

    def _drop_some(self) -> None:
        if dropped := self._host.dropping.drop_some(self._freeing):
            self.counters.chunks_corrupt[HOST] += len(dropped)
            self._events.extend(CacheEventKind.REMOVED, HOST, dropped)
            self.step.version += 1

    def read_ahead(self, keys: Sequence[Key], count: int, ctx: RequestContext) -> dict[Key, str]:
        """Start to read up to ``count`` of ``keys`` that are in lower tiers only; see :meth:`TierIO.read_ahead`."""
        return self._tier_io.read_ahead(keys, count, ctx.hints, ctx.asked_s)

    # -- stores ------------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Iterable[tuple[Key, int]], ctx: RequestContext) -> StoreGrant | None:
        """Admit those of ``keys`` (key, end token), without repeated ones, that the host tier lacks and admits.

        Returns None if there is no room for all of them: then nothing has changed (S18).
        """
        host, offered = self._host, dict(keys)
        missing, present = host.split_offered(offered)
        if present:  # chunks of this store must not be evicted to make room for others of it
            host.cancel_demotions(present)
            host.pin_to_write(present)  # no use: continue_prefix() has moved them
        chosen = self._admissions.choose(missing, offered, ctx, self.step.now)
        host.unpin_written(present)
        if chosen is None:
            self.counters.stores_refused += 1
            self.passages.note_shortage()
            return None
        wanted, ranks, evicted = chosen
        self.step.stored_s = self.step.now
        slots = self._admissions.admit(wanted, ctx.hints, ranks=ranks)
        if present:
            self._tier_io.used(present, ctx.hints)
            self._tier_io.cascades.computed_again(present, offered, ctx)
        if ctx.hints.has_retention or self.retention.any:
            self.retention.stored(wanted, ctx.hints, self.step.now, self._tier_io.source_of)
        refs, reading = host.slots.newest_refs(slots), host.slots.being_read(present)
        return StoreGrant(tuple(wanted), refs, tuple(evicted), reading)

    def complete_store(self, slots: Iterable[SlotRef], failed: frozenset[Key] = frozenset()) -> None:
        """End a store: its chunks become readable and are queued for lower tiers. Those in ``failed`` are dropped.

        Void leases, also of a second completion, are ignored (S21).
        """
        host = self._host
        ended = host.slots.being_stored(reversed(tuple(slots)))  # tail first: the head of a prefix stays longest (S54)
        if failed:
            bad = [slot for slot in ended if host.slots.key(slot) in failed]
            ended = [slot for slot in ended if host.slots.key(slot) not in failed]
            host.failed(bad)
            self.counters.stores_failed += len(bad)
            self.step.version += 1
        filled = host.filled(ended, ChunkEvent.STORED)
        self.counters.chunks_stored += len(filled.keys)
        self._tier_io.cascades.became_ready(filled, self.step.now)

    def continue_prefix(self, keys: Sequence[Key], chunk_tokens: int, ctx: RequestContext) -> None:
        """Note that a request will store chunks behind those of ``keys``, its prompt, that are in a tier."""
        self._touches.continue_prefix(keys, chunk_tokens, ctx)

    def touch(self, keys: Sequence[Key]) -> None:
        """Count a use of chunks in every tier that has them, without moving any; see :class:`Touches`."""
        self._touches.add(keys)

    # -- attached and detached tiers ---------------------------------------------------------------------------------

    def attach(self, tier: LowerTier, before: str | None = None) -> None:
        """Put a lower tier in service, ahead of the one named ``before``, or last. Its index must be loaded.

        Raises:
            EngineProtocolError: there is a tier of that name, or none named ``before``.
        """
        if tier.name in self.tier_names:
            raise EngineProtocolError(f"there is a tier {tier.name!r} already; give the new one another `name`")
        follower = None if before is None else self.tiers.named(before)
        self._tier_io.attach(tier, follower)
        self._request_feed.add_tier(tier.name, tier.policy)

    def detach(self, name: str) -> int:
        """Take a lower tier out of service. :meth:`forget` follows when its operations have ended.

        Returns:
            Its number.

        Raises:
            EngineProtocolError: there is no lower tier of that name.
        """
        tier = self.tiers.named(name)
        self._tier_io.detach(tier)
        self._request_feed.remove_tier(name)
        return tier.index

    def forget(self, index: int) -> None:
        """Discard the state of a detached tier whose operations have all ended."""
        self._tier_io.forget(index)

    @property
    def policies(self) -> list[tuple[str, EvictionPolicy]]:
        """Each tier's name and eviction policy, the host tier first."""
        return [(HOST, self._host.policy), *((tier.name, tier.policy) for tier in self.tiers)]

    @property
    def host_is_idle(self) -> bool:
        """Whether every slot of the host tier is free or may be evicted."""
        return self._host.room == self._host.num_slots

    # -- whole cache -------------------------------------------------------------------------------------------------

    def take_events(self, keys_max: int | None = None) -> list[CacheEvent]:
        """Take the oldest cache events that were not taken: chunks stored and removed, per tier.

        keys_max: number of keys whose events are taken, about; None: all.
        """
        return self._events.take(keys_max)

    def check_reset(self, scope: ResetScope) -> None:
        """Check that a reset of that scope is possible.

        Raises:
            EngineProtocolError: a tier is shared or read-only, so this stack must not delete its chunks.
        """
        if scope == "all":
            self.tiers.check_ours()

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Make every chunk of the host tier, or of all tiers, invisible at once. Later steps free slots and bytes.

        Slots that I/O still uses become free when it ends. A lower tier answers nothing and takes nothing until its
        backend has deleted everything.

        Raises:
            EngineProtocolError: as :meth:`check_reset`; nothing has changed.
        """
        self.check_reset(scope)
        for tier in self.tiers if scope == "all" else ():
            tier.reset()
            self._events.cleared(tier.name)
            self.step.version += 1
        self.passages.release_all()
        self._admissions.reset()
        self.retention.forget_one_shots()
        self._events.cleared(HOST)

    @property
    def has_pending_changes(self) -> bool:
        """Whether lower tiers have chunks to write, or to delete after a reset."""
        return self._tier_io.has_pending_changes

    def flush(self) -> None:
        """Count what was lost before, and begin a flush; :attr:`has_pending_changes` reports when all is written."""
        self._tier_io.flush()

    def validate(self) -> None:
        """Check every invariant of all parts. O(chunks).

        Raises:
            InvariantError: one is broken; names it.
        """
        self._host.validate()
        self.passages.validate()
        self._tier_io.validate()
