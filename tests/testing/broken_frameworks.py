"""Promises of the framework broken on purpose, for the kit's tests that put a backend into a stack."""

# ruff: noqa: D103 - the name of a break is its description
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from at_rest import content_of
from simulation.breaks import core_breaks

from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.health.breaker import Breaker
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.residency import Residency
from tierkv.manager.moves import tier_io as tier_traffic
from tierkv.manager.moves.in_flight import InFlightOps
from tierkv.manager.moves.write_through import Cascades
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.stack import tier_factory as tier_opening
from tierkv.stack.stack import Stack
from tierkv.testing.engines import hand_engine, small_stack
from tierkv.tiers import results, retry
from tierkv.tiers.tier import Tier

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Break:
    """A broken promise, the kit's test that must notice it, and the plain backend (of plain_files) with which.

    attempts: at most, where chance decides whether the break shows.
    """

    test: str
    apply: Callable[[Patch], None]
    plugin: str = "PLUGIN"
    attempts: int = 1


BREAKS: dict[str, Break] = {}


def noticed_by(
    *tests: str, plugin: str = "PLUGIN", attempts: int = 1
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a break."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        def impatient(patch: Patch) -> None:
            patch.setattr(hand_engine, "PATIENCE_S", 3.0)
            patch.setattr(small_stack, "PATIENCE_S", 3.0)
            apply(patch)

        for test in tests:
            BREAKS[f"{apply.__name__}-{test.removeprefix('test_')}"] = Break(test, impatient, plugin, attempts)
        return apply

    return register


@noticed_by("test_bad_reads_are_misses")
def nothing_is_verified(patch: Patch) -> None:
    opening = small_stack.open_stack
    patch.setattr(small_stack, "open_stack", lambda *args, **options: opening(*args, verify_frames=False, **options))


@noticed_by("test_raising_reads_are_misses", "test_a_raising_verb_stops_nobody", "test_lies_are_misses")
def what_failed_once_is_never_tried_again(patch: Patch) -> None:
    patch.setattr(
        LowerTier, "mark_absent", lambda self, key, now: self.presence_cache.put(key, float("inf"), present=False)
    )
    store = LowerTier.stored

    def stored(self: LowerTier, entries: Any, now: float) -> None:
        suspects = [key for key, _ in entries if self.presence_cache.get(key, now) is False]
        store(self, entries, now)
        for key in suspects:
            self.presence_cache.put(key, float("inf"), present=False)

    patch.setattr(LowerTier, "stored", stored)


@noticed_by("test_a_hot_hit_is_answered_at_once")
def the_first_answer_is_always_later(patch: Patch) -> None:
    ask = Stack.get_num_new_matched_tokens
    asked: set[str] = set()

    def shy(self: Stack, request: Any, computed: int) -> Any:
        if request.request_id in asked:
            return ask(self, request, computed)
        asked.add(request.request_id)
        return None, False

    patch.setattr(Stack, "get_num_new_matched_tokens", shy)


@noticed_by("test_raising_leaves_hot_chunks_hits")
def every_tier_is_asked_first(patch: Patch) -> None:
    ask = Stack.get_num_new_matched_tokens

    def nosy(self: Stack, request: Any, computed: int) -> Any:
        for tier in self._core.wiring.dispatcher._tiers:
            tier.backend.contains(())
        return ask(self, request, computed)

    patch.setattr(Stack, "get_num_new_matched_tokens", nosy)


@noticed_by("test_two_requests_read_a_chunk_once")
def everything_is_read_twice(patch: Patch) -> None:
    read = Tier._read

    async def twice(self: Tier, keys: Any, slots: Any) -> Any:
        await read(self, keys, slots)
        return await read(self, keys, slots)

    patch.setattr(Tier, "_read", twice)


@noticed_by("test_a_write_that_is_not_there_is_a_miss", "test_half_a_write_is_a_miss")
def what_is_gone_is_still_believed_in(patch: Patch) -> None:
    patch.setattr(LowerTier, "forget", lambda self, key, now: False)


@noticed_by("test_one_failed_key_fails_alone_in_writes", "test_one_failed_key_fails_alone_in_reads")
def one_failed_key_fails_its_batch(patch: Patch) -> None:
    call_backend = Tier._call_backend

    async def harsh(self: Tier, *args: Any) -> Any:
        results = await call_backend(self, *args)
        failed = [result for result in results if isinstance(result, BaseException)]
        return [failed[0]] * len(results) if failed else results

    patch.setattr(Tier, "_call_backend", harsh)


@noticed_by("test_failed_writes_bar_no_key_and_leak_no_slot")
def failed_writes_keep_their_slots(patch: Patch) -> None:
    ended = InFlightOps._write_ended

    def leaky(self: Any, tier: Any, pending: Any, outcomes: Any) -> None:
        if any(outcome.error for outcome in outcomes):
            self._host.pin(pending.slots)
        ended(self, tier, pending, outcomes)

    patch.setattr(InFlightOps, "_write_ended", leaky)


@noticed_by("test_a_passing_trouble_is_retried")
def nothing_is_retried(patch: Patch) -> None:
    patch.setattr(results, "_may_pass", lambda error: False)


@noticed_by("test_a_full_place_is_evicted_from")
def full_is_full(patch: Patch) -> None:
    patch.setattr(Cascades, "evict_one", lambda self, tier: None)


@noticed_by("test_the_breaker_opens_and_heals_by_itself", "test_a_scan_that_fails_costs_its_tier_alone")
def a_breaker_never_tries_again(patch: Patch) -> None:
    patch.setattr(Breaker, "trial_is_due", lambda self, now_s: False)


@noticed_by("test_a_wedged_tier_is_soon_left_alone")
def a_breaker_never_opens(patch: Patch) -> None:
    patch.setattr(Breaker, "failed", lambda self, now_s: None)


@noticed_by("test_wedged_reads_end_as_misses", "test_a_wedged_tier_hides_no_other")
@noticed_by("test_wedged_probes_end_as_misses", plugin="SHARED_PLUGIN")
def deadlines_are_far_away(patch: Patch) -> None:
    for name in ("LOOKUP_DEADLINE_S", "READ_DEADLINE_S", "PROBE_DEADLINE_S"):
        patch.setattr(small_stack, name, 80_000.0)


@noticed_by("test_wedged_writes_do_not_stop_stores")
def writes_may_hold_every_slot(patch: Patch) -> None:
    patch.setattr(tier_opening, "PINNED_BY_WRITES_SHARE", 1.0)


@noticed_by("test_wedged_deletes_do_not_stop_stores")
def there_is_always_room(patch: Patch) -> None:
    patch.setattr(Residency, "has_room", lambda self, frame_bytes: True)


@noticed_by("test_a_late_read_touches_no_other_chunk")
def a_late_read_gives_its_slot_back(patch: Patch) -> None:
    core_breaks.a_late_read_gives_its_slot_back(patch)


@noticed_by("test_a_late_write_is_not_believed", attempts=5)  # the write may come before the deletion
def a_late_write_is_believed(patch: Patch) -> None:
    def mark_uncertain(self: LowerTier, key: Any, frame_bytes: int) -> None:
        self.residency.add(content_of([(key, frame_bytes)]))
        self.residency._deletions.schedule((key,))

    patch.setattr(LowerTier, "mark_uncertain", mark_uncertain)
    patch.setattr(LowerTier, "deleted", lambda self, key, *, ok, now: False)
    patch.setattr(LowerTier, "validate", lambda self: None)


@noticed_by("test_close_does_not_wait_for_a_wedged_backend")
def a_flush_is_always_well(patch: Patch) -> None:
    patch.setattr(Stack, "flush", lambda self, timeout_s=30.0: True)


@noticed_by("test_a_wedged_scan_does_not_stop_the_opening")
def nobody_is_told_of_a_bad_tier(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_report_unusable", lambda self, state, reason: None)


@noticed_by("test_a_prefix_longer_than_the_host_tier_resolves")
def what_fits_is_all(patch: Patch) -> None:
    patch.setattr(Lookups, "_may_stream", lambda self, record: False)


@noticed_by("test_batches_and_calls_keep_to_the_declaration")
def batches_are_as_long_as_they_are(patch: Patch) -> None:
    patch.setattr(tier_traffic, "_batches", lambda items, size: [items] if items else [])
    patch.setattr(retry, "_batches", lambda indices, size: [indices])


@noticed_by("test_what_is_stored_is_not_written_again")
def everything_is_wanted(patch: Patch) -> None:
    patch.setattr(LowerTier, "wants", lambda self, key, now: not self.residency.rows.is_writing(key))
    patch.setattr(LowerTier, "missing", lambda self, chunks, now: [one for one in chunks if self.wants(one[1], now)])
    ready = Cascades.became_ready
    patch.setattr(Cascades, "became_ready", lambda self, filled, now, source=None: ready(self, filled, now))


@noticed_by("test_an_answer_is_remembered", plugin="SHARED_PLUGIN")
def answers_are_forgotten(patch: Patch) -> None:
    make = LowerTier.__init__

    def forgetful(self: LowerTier, index: Any, name: Any, capabilities: Any, limits: Any, *rest: Any) -> None:
        make(self, index, name, capabilities, replace(limits, presence_ttl_s=0.0), *rest)

    patch.setattr(LowerTier, "__init__", forgetful)


@noticed_by("test_an_eviction_takes_what_is_needed")
def evictions_are_generous(patch: Patch) -> None:
    evict_for = Residency.evict_for

    def generous(self: Residency, *args: Any) -> Any:
        chosen = evict_for(self, *args)
        return chosen + [key for _ in range(80 if chosen else 0) for key in self.evict(1)]

    patch.setattr(Residency, "evict_for", generous)
