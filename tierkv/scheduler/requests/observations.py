"""Requests as policies see them: pure functions from a request record to a :class:`RequestObservation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.cache_events import HOST
from tierkv.types.geometry import cdiv
from tierkv.types.observation import RequestObservation, RequestPhase


def sources_of_hit(record: RequestRecord, manager: OffloadManager) -> Counter[str]:
    """Number of chunks per tier of the hit that was just answered."""
    lookup, passage = record.lookup, manager.passages.get(record.ctx.request_id)
    sources = manager.passages.count_sources(record.ctx.request_id)
    if lookup.will_stream and passage is not None and len(passage.keys) < len(lookup.wanted):
        here = set(passage.keys)
        for key in lookup.wanted:
            if key not in here:
                tier = manager.read_costs.source_of(key, record.ctx)
                sources[HOST if tier is None else manager.tiers[tier].name] += 1
    return sources


def arrival_of(record: RequestRecord, hit_tokens: int, sources: Mapping[str, int], now_s: float) -> RequestObservation:
    """Observation of a request that was answered for the first time.

    Args:
        record: the request; its ``computed_tokens`` are those that the engine found in its own cache.
        hit_tokens: tokens beyond these that can be loaded.
        sources: number of chunks of the hit per tier.
        now_s: on the stack's clock.
    """
    local = record.computed_tokens
    ends = [cdiv(local + hit_tokens, group.chunk_tokens) for group in record.groups]
    return RequestObservation(
        request_id=record.ctx.request_id,
        phase=RequestPhase.ARRIVED,
        now_s=now_s,
        paths=tuple(tuple(group.keys) for group in record.groups),
        gpu_chunks=tuple(min(local // group.chunk_tokens, len(group.keys)) for group in record.groups),
        new_chunks=tuple(max(0, len(group.keys) - end) for group, end in zip(record.groups, ends, strict=True)),
        tier_chunks=dict(sources),
        hints=record.ctx.hints,
    )


def end_of(record: RequestRecord, now_s: float) -> RequestObservation:
    """Observation of a request that has ended. One that was never answered has no counts."""
    arrival = record.arrival or RequestObservation(
        request_id=record.ctx.request_id,
        phase=RequestPhase.FINISHED,
        now_s=now_s,
        paths=(),
        gpu_chunks=(0,) * len(record.groups),
        new_chunks=(0,) * len(record.groups),
        hints=record.ctx.hints,
    )
    paths = tuple(tuple(group.keys[: record.computed_tokens // group.chunk_tokens]) for group in record.groups)
    return replace(arrival, phase=RequestPhase.FINISHED, now_s=now_s, paths=paths)
