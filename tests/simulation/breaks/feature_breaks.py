"""More promises broken on purpose: tiers that come and go, resets of all tiers, tenants, what is installed, loads
that stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation.breaks.registry import Patch, breaks
from simulation.checks.checks import DURABLE
from simulation.checks.exception_guard import INSIDE
from simulation.checks.monitor import CONCEALED, EVENTS, JOBS, RESET
from simulation.checks.quotas import QUOTAS
from simulation.checks.service import PROGRESS
from simulation.engine.kv_memory import WRONG_BYTES
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.manager.host.chunk import Evicted
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.residency import Residency
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.lower.tier_phase import TierEvent
from tierkv.manager.manager import OffloadManager
from tierkv.manager.moves.tier_io import TierIO
from tierkv.policies.quotas import Quotas
from tierkv.policies.s3_fifo import S3FifoPolicy
from tierkv.scheduler.load.loads import Loads
from tierkv.scheduler.load.stream import Stream
from tierkv.scheduler.load.stream_state import STREAM_TRANSITIONS, StreamEvent, StreamState
from tierkv.stack.tier_lifecycle import TierChanges
from tierkv.tiers.framing import Framer
from tierkv.types.keys import make_scope
from tierkv.types.tier_ops import TierContent
from tierkv.types.transfers import TransferJob

__all__: list[str] = []  # the registry has all breaks

# -- tiers that come and go ------------------------------------------------------------------------------------------


@breaks("changes", PROGRESS)
def a_detached_tier_still_answers(patch: Patch) -> None:
    """The tier stays in the list that lookups and writes use."""

    def detach(self: TierIO, tier: LowerTier) -> None:
        self._events.cleared(tier.name)
        self._step.version += 1

    patch.setattr(TierIO, "detach", detach)


@breaks("changes", PROGRESS)
def completions_of_a_detached_tier_are_lost(patch: Patch) -> None:
    finish = Dispatcher._finish

    def lossy(self: Dispatcher, state: Any, ticket: Any, outcomes: Any, now_s: float) -> None:
        if state.detach_by_s is None:
            finish(self, state, ticket, outcomes, now_s)
        else:
            self._end(state, ticket)

    patch.setattr(Dispatcher, "_finish", lossy)


@breaks("changes", PROGRESS)
def a_tier_has_left_while_its_calls_hang(patch: Patch) -> None:
    patch.setattr("tierkv.dispatch.tier_state.TierState.has_detached", property(lambda self: self.close_began))


@breaks("changes", PROGRESS)
def a_detached_tier_is_never_closed(patch: Patch) -> None:
    patch.setattr("tierkv.dispatch.tier_state.TierState.close_backend", lambda self: setattr(self, "close_began", True))


@breaks("changes", DURABLE)
def an_attached_tier_forgets_what_it_held(patch: Patch) -> None:
    patch.setattr(TierChanges, "_scan", lambda self, tier, timeout_s: TierContent())


@breaks("changes", EVENTS)
def deletions_in_a_detached_tier_are_reported(patch: Patch) -> None:
    patch.setattr(LowerTier, "emits_events", property(lambda self: not self.phase.emptying))


# -- whole cache -----------------------------------------------------------------------------------------------------


@breaks("resets", RESET)
def a_reset_of_all_leaves_lower_tiers_readable(patch: Patch) -> None:
    reset = OffloadManager.reset_cache
    patch.setattr(OffloadManager, "reset_cache", lambda self, scope="host": reset(self, "host"))


@breaks("resets", RESET)
def an_emptied_tier_is_in_use_before_it_is_empty(patch: Patch) -> None:
    proceed = LowerTier.continue_reset

    def hasty(self: LowerTier, victims_max: int) -> int:
        count = proceed(self, victims_max)
        if self.phase.emptying:
            self._apply(TierEvent.EMPTIED)
        return count

    patch.setattr(LowerTier, "continue_reset", hasty)


@breaks("resets", RESET)
def a_shared_tier_is_emptied_with_the_others(patch: Patch) -> None:
    patch.setattr(TierList, "check_ours", lambda self: None)


# -- tenants ---------------------------------------------------------------------------------------------------------


def _scopes(patch: Patch, scope: Callable[[str | None, str | None], bytes]) -> None:
    """The expected keys have the same error, so only bytes can show it."""
    patch.setattr("tierkv.scheduler.requests.record.make_scope", scope)
    patch.setattr("simulation.engine.expected_bytes.make_scope", scope)


@breaks("tenants", WRONG_BYTES)
def keys_do_not_say_whose_they_are(patch: Patch) -> None:
    _scopes(patch, lambda cache_salt, adapter: make_scope(None, adapter))


@breaks("tenants", WRONG_BYTES)
def an_adapter_is_not_in_the_keys(patch: Patch) -> None:
    _scopes(patch, lambda cache_salt, adapter: make_scope(cache_salt, None))


@breaks("tenants", QUOTAS)
def quotas_are_not_kept_in_the_host_tier(patch: Patch) -> None:
    patch.setattr(HostTier, "evict_over_quota", lambda self: Evicted((), []))


@breaks("tenants", QUOTAS)
def quotas_are_not_kept_below(patch: Patch) -> None:
    patch.setattr(Residency, "evict_over_quota", lambda _self, _victims_max: [])


@breaks("tenants", QUOTAS)
def named_quotas_are_ignored(patch: Patch) -> None:
    patch.setattr(
        Quotas,
        "of",
        lambda self, tenant: self.capacity_bytes if self.each is None else min(self.each, self.capacity_bytes),
    )


# -- what is installed -----------------------------------------------------------------------------------------------


@breaks("calm", CONCEALED)
def a_chunk_that_gets_no_shorter_is_written_in_the_clear(patch: Patch) -> None:
    pytest.importorskip("cryptography")
    encode = Framer._encode_payload

    def lazy(self: Framer, codec: Any, slot: memoryview, header: Any, staging: memoryview) -> int:
        return 0 if self._rules.conceals else encode(self, codec, slot, header, staging)

    patch.setattr(Framer, "_encode_payload", lazy)


@breaks("mixed", INSIDE)
def a_policy_evicts_what_is_held(patch: Patch) -> None:
    """The guard replaces the policy: an engine would not notice, and the policy would not be fixed."""
    evict = S3FifoPolicy.evict
    patch.setattr(S3FifoPolicy, "evict", lambda self, count, holds: evict(self, count, bytes(len(holds))))


# -- loads that stream -----------------------------------------------------------------------------------------------


@breaks("tiny-host", RESET, first=31)
def a_reset_forgets_what_legs_have_brought(patch: Patch) -> None:
    """Only blocks of jobs in flight become invalid, not those of earlier jobs of the same load."""

    def reset(self: Loads) -> None:
        for stream in self._streams.values():
            stream.cut_short()
            self._drop_void_chunks(stream)

    patch.setattr(Loads, "reset", reset)


@breaks("tiny-host", JOBS)
def a_segment_joins_another(patch: Patch) -> None:
    """Only the last one may: the slots of both would be missing for the reads behind them."""
    patch.setattr(Loads, "_is_rest_ready", lambda _self, _stream, passage: passage is not None and passage.ready)
    patch.setitem(STREAM_TRANSITIONS, (StreamState.COPYING, StreamEvent.SEGMENT_SENT), StreamState.COPYING)


@breaks("tiny-host", WRONG_BYTES)
def what_does_not_come_is_not_said(patch: Patch) -> None:
    """An abandoned load ends as if all of it had been copied."""
    send = Stream.make_job

    def hopeful(self: Stream, *what: Any) -> TransferJob:
        void, self._void = self._void, []
        job = send(self, *what)
        self._void = void
        return job

    patch.setattr(Stream, "make_job", hopeful)
    patch.setattr(Stream, "is_cut", property(lambda self: False))
