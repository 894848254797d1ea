"""Questions to a shared tier: how many at once, of how many keys, and in which order."""

from __future__ import annotations

import random

import pytest

from tierkv.manager.lower import probe_queue
from tierkv.manager.lower.probe_queue import ProbeQueue
from tierkv.types.keys import Key, make_key

KEYS = [make_key(b"chunk %d" % i, 0) for i in range(3000)]
ALL = 10**6


def queue_of(concurrency: int = 8, keys_min: int = 4, keys_max: int = 1024, seconds: float = 0.25) -> ProbeQueue:
    """Queue of a shared tier."""
    return ProbeQueue(concurrency, keys_min, keys_max, seconds)


def put(queue: ProbeQueue, keys: list[Key]) -> None:
    """Ask for keys."""
    for key in keys:
        queue.put(key)


def test_each_key_once_in_order() -> None:
    """Keys are asked for once, in the order in which they were wanted, the prefix of the first request first."""
    queue = queue_of(concurrency=1, keys_min=2)
    put(queue, [KEYS[1], KEYS[0], KEYS[1], KEYS[2]])
    assert queue.take(ALL) == [(KEYS[1], KEYS[0], KEYS[2])]
    put(queue, KEYS[:4])
    assert queue.take(ALL) == [], "one probe at a time"
    queue.ended((KEYS[1], KEYS[0], KEYS[2]), (), 3, 0.1)
    assert queue.take(ALL) == [(KEYS[3],)]


def test_what_waits_is_divided_among_the_probes_at_once() -> None:
    """A backend that takes eight calls at once answers eight times as fast, so its threads share one request's keys."""
    queue = queue_of()
    put(queue, KEYS[:200])
    probes = queue.take(ALL)
    assert [len(probe) for probe in probes] == [25] * 8
    assert [key for probe in probes for key in probe] == KEYS[:200]
    few = queue_of()
    put(few, KEYS[:6])
    assert [len(probe) for probe in few.take(ALL)] == [4, 2], "not one key each: a call costs more than a key"


@pytest.mark.parametrize(("s_per_key", "keys"), [(0.0001, 1024), (0.0025, 100), (0.02, 12), (1.0, 4)])
def test_a_probe_is_as_long_as_the_tier_answers_in_time(s_per_key: float, keys: int) -> None:
    """Slow tiers get short probes, so that a missed deadline concerns few keys. Fast tiers get long ones."""
    queue = queue_of(concurrency=2)
    put(queue, KEYS)
    sizes = []
    while probes := queue.take(ALL):
        sizes += [len(probe) for probe in probes]
        for probe in probes:
            queue.ended(probe, (), len(probe), s_per_key * len(probe))
    assert sizes[:2] == [probe_queue.FIRST_KEYS] * 2
    assert max(sizes[2:]) in range(keys - 1, keys + 1)


def test_keys_that_were_not_asked_for_come_first() -> None:
    """They have waited longest."""
    queue = queue_of(concurrency=1, keys_max=4)
    put(queue, KEYS[:8])
    (probe,) = queue.take(ALL)
    queue.ended(probe, probe[2:], 2, 2.0)
    assert queue.take(ALL) == [(KEYS[2], KEYS[3], KEYS[4], KEYS[5])]


def test_a_step_takes_what_its_budget_allows() -> None:
    """The engine's thread handles each key: a prompt of thousands takes several steps, and nothing is lost."""
    queue = queue_of(concurrency=64)
    put(queue, KEYS[:100])
    assert sum(map(len, queue.take(30))) == 30
    assert queue.take(0) == []
    assert sum(map(len, queue.take(ALL))) == 70


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests wait: what is remembered of them is bounded, and the rest asks again later."""
    monkeypatch.setattr(probe_queue, "WAITING_KEYS_MAX", 10)
    queue = queue_of()
    put(queue, KEYS)
    assert len(queue) == 10
    queue.clear()
    assert not queue


def test_every_key_is_answered_once() -> None:
    """Whatever ends early or late, each key is asked for until it is answered, and never by two probes at once."""
    rng = random.Random(5)
    for _ in range(30):
        queue = queue_of(rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(8, 200), 0.25)
        put(queue, KEYS[:1000])
        running: list[tuple[Key, ...]] = []
        answered: list[Key] = []
        while queue:
            running += queue.take(rng.randrange(1, 500))
            asked = [key for probe in running for key in probe]
            assert len(asked) == len(set(asked))
            if not running:
                continue
            probe = running.pop(rng.randrange(len(running)))
            cut = rng.choice((len(probe), len(probe), rng.randrange(1, len(probe) + 1)))
            answered += probe[:cut]
            queue.ended(probe, probe[cut:], cut, rng.random())
        assert sorted(answered) == sorted(KEYS[:1000])
