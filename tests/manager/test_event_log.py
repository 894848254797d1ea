"""Events of a step, joined and bounded."""

from __future__ import annotations

import random
from itertools import pairwise

from tierkv.manager.event_log import FREED_PER_KEY, RUN_KEYS_MIN, EventLog
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


def resident_set(events: list[CacheEvent]) -> set[tuple[str, Key]]:
    """Chunks by tier that a consumer of these events knows."""
    known: set[tuple[str, Key]] = set()
    for event in events:
        pairs = {(event.tier, key) for key in event.keys}
        match event.kind:
            case CacheEventKind.STORED:
                known |= pairs
            case CacheEventKind.REMOVED:
                known -= pairs
            case CacheEventKind.CLEARED:
                known = {(tier, key) for tier, key in known if tier != event.tier}
    return known


def test_an_engine_that_never_takes_them() -> None:
    """Promise 6: beyond the bound all are dropped and counted, and their tiers are reported as cleared."""
    counters = CoreCounters()
    log = EventLog(counters, keys_max=10)
    log.extend(STORED, "host", [A, B])
    log.extend(STORED, "disk", [A] * 8)
    assert not counters.events_dropped
    log.add(REMOVED, "host", A)
    assert counters.events_dropped == 11
    log.add(STORED, "disk", C)
    assert log.take() == [
        CacheEvent(CLEARED, "host", ()),
        CacheEvent(CLEARED, "disk", ()),
        CacheEvent(STORED, "disk", (C,)),
    ]


def test_a_late_consumer_knows_nothing_that_is_gone(rng: random.Random) -> None:
    """Dropping the oldest events lost removals: a router then sends requests to an engine that lost their chunks."""
    keys, tiers = [Key(bytes([number])) for number in range(20)], ["host", "disk", "objects"]
    log, truth, seen = EventLog(counters := CoreCounters(), keys_max=30), set[tuple[str, Key]](), list[CacheEvent]()
    known = 0
    for _ in range(3000):
        tier, some = rng.choice(tiers), rng.sample(keys, rng.randint(1, 5))
        pairs = {(tier, key) for key in some}
        if rng.random() < 0.5:
            log.extend(STORED, tier, some)
            truth |= pairs
        else:
            log.extend(REMOVED, tier, some)
            truth -= pairs
        if rng.random() < 0.06:
            seen += log.take(rng.choice([None, 8]))
        if rng.random() < 0.02:
            while part := log.take(8):
                seen += part
            assert resident_set(seen) <= truth
            known += len(resident_set(seen))
    assert known
    assert counters.events_dropped


def test_dropped_keys_are_freed_little_by_little() -> None:
    """Memory of an engine that never asks is bounded, and no call frees all of it."""
    counters = CoreCounters()
    log = EventLog(counters, keys_max=1000)
    sizes = []
    for number in range(20_000):
        log.add((STORED, REMOVED)[number // 7 % 2], "host", A)
        sizes.append(log.kept_keys)
    assert max(sizes) <= 2002
    assert max(before - after for before, after in pairwise(sizes)) <= FREED_PER_KEY
    assert counters.events_dropped >= 18_000


def test_a_bounded_take_leaves_the_rest_in_order() -> None:
    """Promise 5: an engine that takes the events of an hour gets them in parts, and a replay of the parts ends with the
    same resident set as one of the whole."""
    keys = [Key(bytes([number])) for number in range(100)]
    log, whole = EventLog(CoreCounters()), EventLog(CoreCounters())
    for some in (log, whole):
        some.extend(STORED, "host", keys)
        some.cleared("host")
        for key in keys[:10]:
            some.add(STORED, "host", key)
            some.add(REMOVED, "host", key)
    parts = []
    while part := log.take(16):
        assert sum(max(RUN_KEYS_MIN, len(event.keys)) for event in part) < 16 + RUN_KEYS_MIN
        parts.append(part)
    assert len(parts) == 12
    assert [(event.kind, key) for part in parts for event in part for key in event.keys or [None]] == [
        (event.kind, key) for event in whole.take() for key in event.keys or [None]
    ]


def test_events_taken_in_parts_make_room() -> None:
    """An engine that takes events in parts loses none to the bound: those that it took do not count any more."""
    log = EventLog(counters := CoreCounters(), keys_max=150)
    for _ in range(10):
        log.extend(STORED, "host", [A] * 100)
        assert [event.kind for event in (*log.take(60), *log.take(60))] == [STORED, STORED]
        log.cleared("host")
        assert [event.kind for event in log.take(60)] == [CLEARED]
    assert not counters.events_dropped
