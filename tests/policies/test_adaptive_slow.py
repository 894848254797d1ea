"""The policy ``adaptive`` on slow traffic: pauses of hours and days are ages like any others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace as changed
from itertools import count

import pytest

from tierkv.policies.adaptive.classes import CLASSES
from tierkv.policies.adaptive.policy import AdaptivePolicy
from tierkv.policies.adaptive.value_model import AGES, ValueModel
from tierkv.policies.lru import LruPolicy
from tierkv.replay.replaying import replay
from tierkv.replay.trace import TraceRequest
from tierkv.types.keys import Key, make_key

HOUR_S, DAY_S = 3600.0, 86_400.0


def new_keys() -> Iterator[Key]:
    """Keys that no other chunk has."""
    return (make_key(number.to_bytes(16, "big"), 0) for number in count())


def conversations(seed: int, sessions: int, every_s: float, pause_s: float, one_shots: float) -> list[TraceRequest]:
    """Sessions of up to 14 turns that share one of five beginnings, in the order of time.

    Args:
        seed: of everything that is drawn.
        sessions: number of sessions.
        every_s: seconds between the beginnings of two sessions.
        pause_s: median pause between two turns in seconds; one in twenty is five times as long or longer.
        one_shots: share of sessions that end after one turn.
    """
    chance, keys = random.Random(seed), new_keys()
    beginnings = [next(keys) for _ in range(5)]
    trace: list[TraceRequest] = []
    for number in range(sessions):
        path, at_s = (chance.choice(beginnings),), every_s * number
        for _ in range(1 if chance.random() < one_shots else chance.randint(1, 14)):
            path += tuple(next(keys) for _ in range(chance.randint(1, 5)))
            trace.append(TraceRequest(at_s, path))
            at_s += pause_s * chance.lognormvariate(0.0, 1.0)
    return sorted(trace, key=lambda request: request.at_s)


def percent(trace: list[TraceRequest], policy: AdaptivePolicy | LruPolicy, chunks: int) -> float:
    """Hits of a policy in a tier of ``chunks`` chunks, in percent of the requested chunks."""
    return replay(trace, policy, chunks).hit_percent


@pytest.mark.parametrize("seed", [1, 2])
def test_a_week_of_chat_with_pauses_of_hours(seed: int) -> None:
    """Users who come back after hours are usual for a large tier; a policy that knows only minutes refuses them."""
    trace = conversations(seed, 350, 1750.0, 2.7 * HOUR_S, 0.0)
    assert trace[-1].at_s > 6 * DAY_S
    assert percent(trace, AdaptivePolicy(1500), 1500) > percent(trace, LruPolicy(1500), 1500) - 0.5


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("slow_down", [100, 30_000])
def test_an_hour_slowed_down(seed: int, slow_down: int) -> None:
    """Nothing but time differs, so the same chunks deserve to be kept, and nearly the same are.

    30,000 times: most pauses are longer than the ten days at which the last age interval begins.
    """
    hour = conversations(seed, 500, 7.2, 60.0, 0.7)
    assert hour[-1].at_s > HOUR_S
    slow = [changed(request, at_s=slow_down * request.at_s) for request in hour]
    at_pace, slowed_down = (percent(trace, AdaptivePolicy(400), 400) for trace in (hour, slow))
    assert slowed_down > at_pace - 1.5


def test_values_of_very_old_chunks_decline() -> None:
    """The last age interval has no end: with one value for all of it, its chunks would refuse newcomers for ever."""
    values = ValueModel()
    for number in range(CLASSES):
        oldest = values.value(number, AGES[-1])
        assert oldest == pytest.approx(values.table[number][-1])
        assert oldest > 0
        assert [values.value(number, times * AGES[-1]) for times in (2, 50)] == pytest.approx([oldest / 2, oldest / 50])
