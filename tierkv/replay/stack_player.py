"""Replay of a trace through a whole stack: the real scheduler, manager and policies, over tiers that take no time.

Requests are served one after the other, in the order of their arrival. Each looks up its prefix, loads the hit, and
computes and stores the rest. The clock of the stack is the time of the trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.config.resolving import ResolvedStack
from tierkv.errors import ConfigError, InvariantError
from tierkv.frames.frame import frame_bytes
from tierkv.manager.host.host_tier import HostTier
from tierkv.metrics.counters import CoreCounters
from tierkv.plugins.registry import PluginRegistry
from tierkv.replay.instant_tiers import InstantTiers, TierTraffic
from tierkv.replay.trace import Trace, TraceRequest
from tierkv.scheduler.limits import SchedulerLimits, StorePolicy
from tierkv.scheduler.wiring import WiredCore, wire_core
from tierkv.stack.tier_factory import TierTables, share_host_slots
from tierkv.structures.key_table import KeyDirectory
from tierkv.types.cache_events import HOST
from tierkv.types.engine import EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.hints import params_of
from tierkv.types.keys import split_key
from tierkv.types.transfers import VOID_SLOT, WorkerOutput

STEP_CHUNKS = 64
"""Chunks computed in one engine step."""
STEPS_MAX = 100_000
"""Steps without an end of one request after which a replay gives up."""
MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class PlayedStack:
    """Result of a replay through a stack."""

    tiers: tuple[str, ...]
    """Names of the tiers, the host tier first."""
    hits: npt.NDArray[np.int64]
    """Chunks found, by tier and request. A hit begins at the front of a prompt and has no gap."""
    traffic: tuple[TierTraffic, ...]
    """Chunks moved, by tier."""


@dataclass(frozen=True, slots=True)
class _Block:
    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


class _PlayedRequest:
    """Request as the scheduler reads it. Behind its chunks it has one token, which every engine computes."""

    def __init__(self, number: int, request: TraceRequest, chunk_tokens: int) -> None:
        self.request_id = str(number)
        self.block_hashes = [split_key(key)[0] for key in request.keys]
        self.num_tokens = self.num_prompt_tokens = len(request.keys) * chunk_tokens + 1
        self.kv_transfer_params: Mapping[str, Any] = params_of(request.hints)
        self.cache_salt = request.tenant


class StackPlayer:
    """A stack on the time of a trace.

    Args:
        resolved: the stack. Its ``[chunk]`` has no effect: the chunks are those of the trace.
        registry: the installed plugins.
        chunk_bytes: bytes of a chunk.
        chunks_max: different chunks that requests may have. Room for more than that is not made.
    """

    def __init__(self, resolved: ResolvedStack, registry: PluginRegistry, chunk_bytes: int, chunks_max: int) -> None:
        config, slot_bytes = resolved.config, frame_bytes(chunk_bytes)
        room = 2 * chunks_max + 1024  # more slots change nothing, and each costs memory
        slots = min(config.host.capacity // slot_bytes, room)
        if not slots:
            raise ConfigError(
                f"host.capacity = {config.host.capacity} bytes: a chunk of this trace needs {slot_bytes}; give a "
                "larger capacity or smaller chunks"
            )
        self._chunk_tokens = 1
        spec = EngineSpec("replay", "bytes", (GroupSpec(self._chunk_tokens, (chunk_bytes,)),), self._chunk_tokens)
        counters = CoreCounters()
        tables = TierTables(registry, slot_bytes, config.tenants.tracked_max, counters, random.Random(0))
        directory = KeyDirectory()
        lower = [tables.make_table(i, tier, None, directory) for i, tier in enumerate(resolved.tiers)]
        share_host_slots(lower, slots)
        self.core: WiredCore = wire_core(
            Geometry.of(spec),
            HostTier(slots, tables.make_host_policy(config.host, resolved.host_policy, slots)),
            lower,
            limits=SchedulerLimits(
                lookup_deadline_s=config.lookup.deadline_s,
                store_chunks_per_step_max=config.store.chunks_per_step_max,
                prompt_only=config.store.prompt_only,
                weighs_recompute=False,  # tiers take no time here
                store_policy=StorePolicy(config.store.policy),
            ),
            counters=counters,
            reserved_chunks_max=max(1, int(slots * config.host.reserved_share)),
            step_keys_max=config.step.keys_max,
        )
        self._tiers = InstantTiers(resolved.tiers, slot_bytes)
        self._host = TierTraffic(HOST)
        self._now_s = 0.0
        self._first_s: float | None = None
        self._minute = 0
        self._blocks: list[_Block] = []

    @property
    def traffic(self) -> tuple[TierTraffic, ...]:
        """Chunks moved so far, by tier."""
        counters = self.core.counters
        for tier in self._tiers.traffic:
            tier.not_written = counters.cascades_dropped[tier.name] + counters.demotions_dropped[tier.name]
        return (self._host, *self._tiers.traffic)

    def play(self, number: int, request: TraceRequest) -> Mapping[str, int]:
        """Serve one request. Returns the chunks found, by tier."""
        if self._first_s is None:
            self._first_s = request.at_s
        self._now_s, self._minute = request.at_s, int((request.at_s - self._first_s) // MINUTE_S)
        scheduler, played = self.core.scheduler, _PlayedRequest(number, request, self._chunk_tokens)
        self._blocks += map(_Block, range(len(self._blocks) + 1, len(request.keys) + 3))
        self._begin_step()
        scheduler.on_new_request(played)
        tokens = self._answer(played)
        table = self._blocks[: played.num_tokens]
        scheduler.update_state_after_alloc(played, [table], tokens)
        if tokens:
            self._until(lambda report: played.request_id in report.finished)
        self._compute(played, tokens, tuple(block.block_id for block in table))
        self._begin_step()
        scheduler.request_finished(played, [[]])
        account = scheduler.request_account(played.request_id)
        self._until(lambda _: not scheduler.has_pending_work and not self._tiers.completed)
        return {} if account is None else account.loaded_tokens

    def _answer(self, played: _PlayedRequest) -> int:
        for _ in range(STEPS_MAX):
            self._begin_step()
            tokens, _ = self.core.scheduler.get_num_new_matched_tokens(played, 0)
            if tokens is not None:
                return tokens
            self._end_step(StepOutput())
        raise InvariantError(f"request {played.request_id} of the trace has no answer after {STEPS_MAX} steps")

    def _compute(self, played: _PlayedRequest, computed: int, block_ids: tuple[int, ...]) -> None:
        ids, is_first = (block_ids,), True
        while computed < played.num_tokens:
            self._begin_step()
            count = min(STEP_CHUNKS * self._chunk_tokens, played.num_tokens - computed)
            entry = ScheduledRequest(played.request_id, computed, count, ids, replaces_table=is_first)
            self._end_step(StepOutput((entry,)))
            computed, ids, is_first = computed + count, ((),), False

    def _until(self, is_over: Callable[[LoadReport], bool]) -> None:
        for _ in range(STEPS_MAX):
            self._begin_step()
            if is_over(self._end_step(StepOutput())):
                return
        raise InvariantError(f"a replay has no end after {STEPS_MAX} steps of one request")

    def _begin_step(self) -> None:
        manager = self.core.manager
        manager.begin_step(self._now_s)
        while self._tiers.completed:
            manager.on_completion(self._tiers.completed.popleft())
        self.core.scheduler.begin_step(self._now_s)

    def _end_step(self, step: StepOutput) -> LoadReport:
        scheduler, manager = self.core.scheduler, self.core.manager
        meta = scheduler.build_connector_meta(step)
        self._submit()
        for job in meta.loads:
            self._host.read[self._minute] += len(job.slots) - job.slots.count(VOID_SLOT)
        for job in meta.stores:
            self._host.written[self._minute] += len(job.keys)
        jobs = [job.job_id for job in (*meta.loads, *meta.stores)]
        report = scheduler.update_connector_output(WorkerOutput(dict.fromkeys(jobs, 1)))
        self._submit()
        manager.take_events()
        return report

    def _submit(self) -> None:
        for op in self.core.manager.take_ops():
            self._tiers.submit(op, self._minute)


def play_stack(
    trace: Trace,
    resolved: ResolvedStack,
    registry: PluginRegistry,
    chunk_bytes: int,
    progress: Callable[[int], None] = lambda _: None,
) -> PlayedStack:
    """Replay a trace through a stack whose tiers are empty at first.

    Args:
        trace: the requests.
        resolved: the stack.
        registry: the installed plugins.
        chunk_bytes: bytes of a chunk.
        progress: called now and then with the number of requests so far.

    Raises:
        ConfigError: the host tier is smaller than a chunk.
    """
    player = StackPlayer(resolved, registry, chunk_bytes, trace.num_chunks)
    names = (HOST, *(tier.config.name for tier in resolved.tiers))
    hits = np.zeros((len(names), len(trace)), np.int64)
    row = {name: i for i, name in enumerate(names)}
    for number, request in enumerate(trace.requests()):
        for name, count in player.play(number, request).items():
            hits[row[name], number] = count
        if not number % 64:
            progress(number)
    progress(len(trace))
    return PlayedStack(names, hits, player.traffic)
