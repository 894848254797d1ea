"""Reads at arrival: chunks of requests that wait in the engine's queue are read before the engine asks. Sans-IO.

So the time in the queue hides the time of the tiers. Chunks are read in the order of arrival into evictable slots of
the host tier, up to a quarter of what requests may hold, and are the first to give way. Two bounds keep useless reads
rare. What the engine most likely has itself is not read. And while more than a twentieth of the chunks read from lower
tiers were read for nothing, none is read ahead.

Where a group has a window, the chunks that are needed depend on the end of the hit. So the whole hit is searched as the
engine's question will do it, but no tier is asked: a chunk in a shared tier counts as missing unless it is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.manager import OffloadManager
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.engine_cache import EngineCache
from tierkv.scheduler.lookup.load_or_recompute import LoadOrRecompute
from tierkv.scheduler.lookup.search import SearchGroup, find_hit, wanted_keys
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

READS_PER_UNUSED = 20
"""Chunks read from lower tiers for each one that may be read ahead for nothing."""

SLOTS_MIN = 32
"""Slots that requests may hold at least. With fewer, a chunk read ahead could evict what the next request wants."""

CREDIT_CHUNKS = 32
"""Chunks that may be on their way before any was read with success: the number grows with what was used."""


def read_ahead_credit(counters: CoreCounters) -> int:
    """Chunks that may be on their way, from what earlier reads were used for; 0 or less: reading ahead has stopped."""
    return CREDIT_CHUNKS + sum(counters.promotions.values()) - READS_PER_UNUSED * counters.chunks_read_in_vain


class ReadAhead:
    """Requests that have arrived, and that the engine has not asked about yet.

    Args:
        manager: reads.
        geometry: sizes of chunks and windows.
        limits: whether chunks are read ahead at all.
        counters: chunks read ahead, and those read for nothing.
        choice: knows which tiers are slower than computing.
    """

    def __init__(
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        choice: LoadOrRecompute,
    ) -> None:
        self._choice = choice
        self._manager = manager
        self._geometry = geometry
        self._counters = counters
        self._cache = EngineCache(geometry.blocks_per_chunk, active=limits.gpu_prefix_caching)
        self._active = limits.reads_ahead
        self._share = manager.budget.share()
        slots = manager.passages.account.chunks_max
        self._chunks_max = slots // 4 if slots >= SLOTS_MIN else 0
        self._waiting: OrderedDict[str, RequestRecord] = OrderedDict()
        self._num_read = 0

    def arrived(self, record: RequestRecord) -> None:
        """Add a request that has arrived. The engine may ask about it in the same step."""
        if self._active and record.ctx.hints.max_load_tokens != 0:
            self._waiting[record.ctx.request_id] = record

    def allocated(self, record: RequestRecord, num_blocks: int) -> None:
        """Note that the engine has the chunks of a request, or soon will. num_blocks: of its pool, as far as known."""
        self._cache.add(record.search_groups[0].keys, num_blocks)  # begin_step() does the work

    def _update_cache(self) -> None:
        """Bring the estimate of the engine's cache up to date, as far as the budget allows."""
        keys_max = self._share.left * KEYS_PER_LOOK
        self._share.take(cdiv(self._cache.advance(keys_max), KEYS_PER_LOOK))

    def asked(self, record: RequestRecord) -> None:
        """Note that the engine has asked about a request: its passage reads the rest."""
        self._waiting.pop(record.ctx.request_id, None)

    def ended(self, record: RequestRecord, tokens: int = 0) -> None:
        """Count what was read ahead for a request that was answered, runs without an answer, or has ended.

        tokens: beyond the computed ones that are loaded.
        """
        self._waiting.pop(record.ctx.request_id, None)
        if record.read_ahead:
            self._num_read -= len(record.read_ahead)
            wanted = wanted_keys(record.search_groups, record.computed_tokens, tokens) if tokens else ()
            used = self._manager.passages.readable(wanted) & record.read_ahead.keys()
            self._counters.chunks_read_in_vain += len(record.read_ahead) - len(used)
            record.loaded_ahead = {key: record.read_ahead[key] for key in used}
            record.read_ahead = {}

    def begin_step(self) -> None:
        """Read for requests that arrived in an earlier step, as far as room, bounds and budget allow."""
        if self._cache.waiting:
            self._update_cache()
        counters = self._counters
        while self._waiting:
            room = min(self._chunks_max, read_ahead_credit(counters)) - self._num_read
            if room <= 0 or not self._share.take(1):
                return
            _, record = self._waiting.popitem(last=False)
            self._read_for(record, min(room, max(1, self._share.left)))

    def _read_for(self, record: RequestRecord, room: int) -> None:
        """Read the front of what a request will want."""
        record.extend_keys(self._geometry, self._share)  # what is left is read when it is asked for
        ctx = self._choice.context_for_reading(record.ctx)
        groups = record.search_groups
        chunks_max = KEYS_PER_LOOK * max(1, self._share.left)
        num_local = self._cache.prefix(groups[0].keys[:chunks_max])
        self._share.take(num_local // KEYS_PER_LOOK)
        if num_local == chunks_max < len(groups[0].keys):
            return  # the engine has more of it than this step can look up
        local = num_local * groups[0].chunk_tokens
        end_max = record.hit_end_max
        if ctx.hints.max_load_tokens is not None:
            end_max = min(end_max, local + ctx.hints.max_load_tokens)
        find_end = self._end_with_windows if self._geometry.has_windows else self._end_of_front
        end = find_end(groups, local, end_max, room, ctx)
        if end - local < max(group.chunk_tokens for group in groups):
            return
        wanted = wanted_keys(groups, local, end - local)
        read = self._manager.read_ahead(wanted, room, ctx)
        self._share.take(len(read) + cdiv(len(wanted), SLOTS_PER_KEY))  # what is in the host tier counts as used
        if read:
            record.read_ahead = read
            self._num_read += len(read)
            self._counters.chunks_read_ahead += len(read)

    def _end_of_front(
        self, groups: Sequence[SearchGroup], local: int, end_max: int, room: int, ctx: RequestContext
    ) -> int:
        """Last token of the front that is present, as far as it can be read and looked up now."""
        end = min(end_max, local + max(room, self._share.left * SLOTS_PER_KEY) * groups[0].chunk_tokens)
        for group in groups:
            needs = group.needs(local, end)
            stop = min(needs.stop, len(group.keys))
            found = self._manager.present_prefix(group.keys, needs.start, stop, ctx)
            self._share.take(found // KEYS_PER_LOOK)
            end = min(end, (needs.start + found) * group.chunk_tokens)
        return end

    def _end_with_windows(
        self,
        groups: Sequence[SearchGroup],
        local: int,
        end_max: int,
        room: int,  # noqa: ARG002 - the hit ends where it ends, whatever can be read of it
        ctx: RequestContext,
    ) -> int:
        """Last token of the whole hit; ``local`` if it cannot be searched, or not be gathered at once."""
        manager, share = self._manager, self._share
        if sum([len(group.needs(local, end_max)) for group in groups]) > min(
            manager.passages.hold_chunks_max, share.left * SLOTS_PER_KEY
        ):
            return local

        def presence(key: Key) -> LookupResult | None:
            """Look up a chunk, without a question to a tier."""
            if not share.take(1):
                return None
            return LookupResult.HIT if manager.present_prefix((key,), 0, 1, ctx) else LookupResult.MISS

        def present_prefix(keys: Sequence[Key], start: int, stop: int) -> int:
            """Look up a run of chunks."""
            found = manager.present_prefix(keys, start, stop, ctx)
            share.take(found // KEYS_PER_LOOK)
            return found

        return local + find_hit(groups, local, end_max, presence, present_prefix).tokens
