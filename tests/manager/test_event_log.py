"""Events of a step, joined and bounded."""

from __future__ import annotations

from tierkv.manager.event_log import EventLog
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key

STORED, REMOVED, CLEARED = CacheEventKind.STORED, CacheEventKind.REMOVED, CacheEventKind.CLEARED
A, B, C = Key(b"a"), Key(b"b"), Key(b"c")


def test_neighbours_are_joined_and_order_is_kept() -> None:
    """One event for a run of the same kind and tier; what came between two runs stays between them, or a replay would
    end with another resident set."""
    log = EventLog(CoreCounters())
    log.add(STORED, "host", A)
    log.add(STORED, "host", B)
    log.add(STORED, "disk", B)
    log.add(REMOVED, "host", A)
    log.cleared("host")
    log.add(STORED, "host", A)
    assert log.take() == [
        CacheEvent(STORED, "host", (A, B)),
        CacheEvent(STORED, "disk", (B,)),
        CacheEvent(REMOVED, "host", (A,)),
        CacheEvent(CLEARED, "host", ()),
        CacheEvent(STORED, "host", (A,)),
    ]
    assert log.take() == []


def test_an_engine_that_never_takes_them() -> None:
    """Promise 6: the oldest are dropped, whole events at a time, and counted; the newest are kept."""
    counters = CoreCounters()
    log = EventLog(counters, keys_max=3)
    for _ in range(100):
        log.add(STORED, "host", A)
        log.add(REMOVED, "host", A)
        log.cleared("host")
    kept = log.take()
    assert len(kept) == 3
    assert kept[-1].kind is CLEARED
    assert counters.events_dropped == 297
