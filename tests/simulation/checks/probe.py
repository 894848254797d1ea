"""Probe: reads the state inside a stack. The only module of the simulation that uses private names of the core.

Everything else is judged from what a stack says and does: its answers, events, instructions and bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tierkv.manager.host.chunk import Evicted
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.manager.manager import OffloadManager
from tierkv.memory.arena import HostArena
from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.stack.stack import Stack
from tierkv.stack.tier_lifecycle import TierChange
from tierkv.types.cache_events import HOST, CacheEvent
from tierkv.types.engine import StepOutput
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import TierOp, TierReport
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.worker import Worker


class Kept(NamedTuple):
    """Chunk in a tier. used: it must not be evicted. lease: generation of its slot, which may have had it before."""

    size: int
    used: bool
    lease: int = 0


class Probe:
    """Read-only view inside one stack, but for :meth:`listen`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._wiring = stack._core.wiring

    @property
    def scheduler(self) -> OffloadScheduler:
        """Scheduler of the stack."""
        return self._stack._scheduler

    @property
    def manager(self) -> OffloadManager:
        """Manager of the stack."""
        return self._wiring.manager

    @property
    def arena(self) -> HostArena:
        """Memory of the host tier."""
        return self._wiring.arena

    def listen(
        self,
        submitted: Callable[[TierOp], None],
        drained: Callable[[list[TierReport]], None],
        handed_out: Callable[[ConnectorMeta], None],
        reported: Callable[[int, WorkerOutput], None],
    ) -> None:
        """Observe every instruction to a tier or a worker, and every report before the stack receives it."""
        build = self._stack.build_connector_meta

        def build_aloud(step: StepOutput) -> ConnectorMeta:
            meta = build(step)
            handed_out(meta)
            return meta

        vars(self._stack)["build_connector_meta"] = build_aloud
        vars(self._stack._core)["_dispatcher"] = _Tap(self._wiring.dispatcher, submitted, drained)
        for index, worker in enumerate(workers_of(self._stack)):
            vars(worker)["get_finished"] = partial(_observed, worker.get_finished, partial(reported, index))

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop of async tiers, if there are any."""
        loop = self._wiring.dispatcher._loop
        return None if loop is None else loop[0].loop

    # -- host tier ---------------------------------------------------------------------------------------------------

    def readable(self, keys: Iterable[Key]) -> set[Key]:
        """Those of ``keys`` that are readable in the host tier."""
        prefix = self.manager.resident_prefix
        return {key for key in keys if prefix((key,), 0, 1)}

    def offered_slots(self, request_id: str) -> dict[Key, int]:
        """Chunks that are held for a request, with their slots."""
        granted = self.manager.passages.granted(request_id)
        return {key: chunk.slot for key, (chunk, _) in granted.items()}

    def streamed_keys(self, request_id: str) -> set[Key]:
        """Chunks of an offer that are read from below during the load."""
        record = self.scheduler._records[request_id]
        return set(record.lookup.wanted).difference(record.lookup.gathered) if record.lookup.will_stream else set()

    def held_slots(self) -> tuple[dict[str, set[int]], int]:
        """Slots that are held for each request, and the number of slots that may be held or copied together."""
        passages = self.manager.passages
        held = {one: {chunk.slot for chunk, _ in passages.granted(one).values()} for one in passages.owners}
        return held, passages.account.chunks_max

    @property
    def hold_chunks_max(self) -> int:
        """Number of chunks that one request can hold at once."""
        return self.manager.passages.hold_chunks_max

    def deferred_tier_s(self, request_id: str) -> float:
        """Seconds of the request's deferrals in which a tier was at work, as its account says."""
        account = self.scheduler.request_account(request_id)
        return 0.0 if account is None else account.deferred_tier_s

    def waited_for_a_load_s(self, request_id: str) -> float:
        """Seconds for which a request, with all its chunks held, has waited for a load of another that did not move."""
        return self.scheduler._records[request_id].lookup.load_waited_s

    def search(self, request_id: str) -> tuple[Sequence[SearchGroup], int]:
        """Groups of a request as the search needs them, and the largest end of a hit."""
        record = self.scheduler._records[request_id]
        return record.search_groups, record.hit_end_max

    def ready_slots(self) -> list[tuple[Key, int]]:
        """All readable chunks with their slots."""
        host = self.manager._host
        return [(chunk.key, chunk.slot) for chunk in host.slots.visible() if chunk.state.value == "ready"]

    def idle_slots(self) -> set[int]:
        """Slots of readable chunks without a holder."""
        host = self.manager._host
        return {slot for _, slot in self.ready_slots() if host.slots.is_idle(slot)}

    def waiting_slots(self) -> set[int]:
        """Slots of readable chunks that wait for a tier in service that will store them."""
        host, now = self.manager._host, self.manager.step.now
        ready = {(slot, host.slots.generation(slot)): key for key, slot in self.ready_slots()}
        return {
            lease[0]
            for tier in self.tiers().values()
            if tier.phase is TierPhase.SERVING
            for lease in tier.write_queue.first(len(tier.write_queue))
            if lease in ready and tier.wants(ready[lease], now)
        }

    def dirty_pinned(self) -> set[int]:
        """Slots of dirty chunks that are pinned."""
        return set(self.manager._tier_io.admissions.dirty_pins.slots)

    def num_writing(self) -> int:
        """Number of writes of a chunk to a tier that are under way, also to detached tiers."""
        return sum(tier.residency.num_writing for tier in self.manager.tiers.with_detached)

    def may_pin(self) -> bool:
        """Whether the budget of the step allows more pins."""
        return self.manager._tier_io.admissions.dirty_pins._share.left > 0

    def listen_to_evictions(self, evicted: Callable[[set[int], Iterable[int]], None]) -> None:
        """Observe the slots freed by evictions, with the slots of chunks that were dirty before."""
        host = self.manager._host
        choose = host.evict_for

        def choose_aloud(count: int) -> Evicted | None:
            waiting = self.waiting_slots()
            chosen = choose(count)
            evicted(waiting, chosen.slots if chosen is not None else ())
            return chosen

        vars(host)["evict_for"] = choose_aloud

    def listen_to_trims(self, chosen: Callable[[list[Key]], None]) -> None:
        """Observe the chunks above a quota that are chosen to be written below before they leave the host tier."""
        host = self.manager._host
        choose = host.begin_quota_demotions

        def choose_aloud() -> list[int]:
            slots = choose()
            chosen([host.slots.key(slot) for slot in slots])
            return slots

        vars(host)["begin_quota_demotions"] = choose_aloud

    def slots_at_rest(self) -> bool:
        """Whether every slot is free or can be evicted."""
        host = self.manager._host
        return host.room == host.num_slots

    def is_swept(self) -> bool:
        """Whether no chunk from before a reset is in the host tier."""
        return not self.manager._host.slots.unswept

    # -- lower tiers -------------------------------------------------------------------------------------------------

    def tiers(self) -> dict[str, LowerTier]:
        """Lower tiers in service, in order."""
        return {tier.name: tier for tier in self.manager.tiers}

    def name_of(self, index: int) -> str:
        """Name of the tier of that number, also of a detached one."""
        return self._wiring.changes.names[index]

    def served(self) -> list[str]:
        """Names of all tiers of the dispatcher, also of those that are leaving."""
        return [self.name_of(index) for index in self._wiring.dispatcher._tier_states]

    def attach(self, table: Mapping[str, Any], before: str | None, scan_timeout_s: float) -> TierChange:
        """Attach a tier as ``stack.tiers.attach`` does, with a time limit of the simulation."""
        return self._wiring.changes.attach(table, before, scan_timeout_s)

    def resident(self, tier: str) -> set[Key]:
        """Chunks in the index of a tier."""
        table = self.tiers()[tier]
        return set() if table.phase.emptying else set(table.residency)

    def room_in_chunks(self, tier: str) -> int:
        """Number of chunks that a tier with a capacity has room for."""
        residency = self.tiers()[tier].residency
        sizes = [size for _, size, _ in residency.rows.listed()]
        return (residency.capacity_bytes or 0) // max(sizes, default=self.arena.slot_bytes)

    def is_known(self, tier: str, key: Key) -> bool:
        """Whether a tier with an index would be read for ``key``."""
        return self.tiers()[tier].presence(key, float("inf")) is LookupResult.HIT

    def may_be_known(self, tier: str, keys: Iterable[Key]) -> set[Key]:
        """Those of ``keys`` that a tier has, or would be asked for, as far as the stack knows."""
        presence, now_s = self.tiers()[tier].presence, self.manager.step.now
        return {key for key in keys if presence(key, now_s) is not LookupResult.MISS}

    def leaving(self, tier: str) -> set[Key]:
        """Chunks being deleted from a tier."""
        return set(self.tiers()[tier].residency.rows.deleting())

    def waiting_writes(self, tier: str) -> int:
        """Number of chunks that wait to be written to a tier."""
        return len(self.tiers()[tier].write_queue)

    def evictable(self, tier: str) -> dict[Key, Kept]:
        """Chunks that a tier's policy may evict."""
        if tier == HOST:
            host, size = self.manager._host, self.arena.slot_bytes
            ready = [chunk for chunk in host.slots.visible() if chunk.state.value == "ready"]
            idle = [chunk for chunk in ready if chunk.slot not in host.slots.demoting]
            return {chunk.key: Kept(size, bool(chunk.pins), host.slots.generation(chunk.slot)) for chunk in idle}
        return {key: Kept(size, used) for key, size, used in self.tiers()[tier].residency.rows.listed()}

    def evictions_pause(self, name: str) -> bool:
        """Whether a lower tier evicts one chunk now and then, because an eviction failed."""
        return name in self.tiers() and self.tiers()[name].residency.evict_again_s > 0

    def tenant_usage(self) -> dict[str, dict[str, int]]:
        """Bytes by tenant, in each tier with quotas."""
        return self._stack.tiers.usage()

    # -- the whole stack ---------------------------------------------------------------------------------------------

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call: all of them, though one call of the stack returns a bounded number."""
        events: list[CacheEvent] = []
        while some := self._stack.events.take():
            events += some
        return events

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping."""
        return self._stack.has_pending_work()

    def pending_io(self) -> int:
        """Operations of tiers in flight, as far as the engine's thread knows."""
        return self._wiring.dispatcher.pending()

    def in_flight(self, tier: int) -> int:
        """Operations of one tier that have not ended."""
        return sum(pending.op.tier == tier for pending in self.manager._tier_io.in_flight)

    def trials(self) -> int:
        """Trials in flight, of unusable tiers."""
        return self._wiring.dispatcher._trials

    def undrained(self) -> int:
        """Operations that have ended and were not taken in yet."""
        return len(self._wiring.dispatcher._done)

    # -- leftovers ---------------------------------------------------------------------------------------------------

    def leftovers(self) -> dict[str, Any]:
        """Everything that must be empty at rest, and is not."""
        scheduler, manager = self.scheduler, self.manager
        things: dict[str, Any] = {
            "requests": list(scheduler._records),
            "jobs": len(scheduler._jobs),
            "fences": len(scheduler._fences),
            "open lookups": list(scheduler._lookups.open_ids),
            "loads waited for": len(scheduler._lookups._loads),
            "passages": manager.passages.owners,
            "slots on the account": manager.passages.account.total,
            "loads that stream": list(scheduler._loads._streams),
            "instructions": len(manager._tier_io.in_flight),
            "pending writes": manager.has_pending_changes,
            "I/O": self._wiring.dispatcher.pending(),
        }
        things["changes of tiers"] = [repr(item) for item in self._wiring.changes.waiting]
        things["tiers that leave"] = [name for name in self.served() if name not in self.tiers()]
        for tier in manager.tiers.with_detached:
            used = {
                "reserved bytes": tier.residency.reserved_bytes,
                "being written": tier.residency.num_writing,
                "being deleted": len(list(tier.residency.rows.deleting())),
                "not quiet": not tier.is_quiet,
                "being emptied": tier.phase.emptying,
            }
            things.update({f"{tier.name}: {name}": value for name, value in used.items()})
        return {name: value for name, value in things.items() if value}


def workers_of(stack: Stack) -> list[Worker]:
    """All workers of a stack."""
    return list(stack.workers)


def _observed(get_finished: Callable[[], WorkerOutput], reported: Callable[[WorkerOutput], None]) -> WorkerOutput:
    output = get_finished()
    reported(output)
    return output


class _Tap:
    """Dispatcher with listeners on both sides."""

    def __init__(
        self,
        inner: Any,
        submitted: Callable[[TierOp], None],
        drained: Callable[[list[TierReport]], None],
    ) -> None:
        self._inner = inner
        self._submitted = submitted
        self._drained = drained

    def submit(self, op: TierOp) -> None:
        self._submitted(op)
        self._inner.submit(op)

    def drain(self, limit: int) -> list[TierReport]:
        completion: list[TierReport] = self._inner.drain(limit)
        self._drained(completion)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
