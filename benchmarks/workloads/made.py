"""Made traces: kinds of traffic that no policy here was tuned on. Equal seeds give equal traces."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

from tierkv.replay.trace import KeysOfIds, TraceRequest


class _Prompts:
    """Chunk ids by path: the same text after the same prefix is the same chunk."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._children: dict[tuple[int, str], int] = {}
        self._keys = KeysOfIds()

    def extended(self, path: tuple[int, ...], name: str, chunks: int) -> tuple[int, ...]:
        """Append a text of ``chunks`` chunks to a path."""
        for part in range(chunks):
            edge = (path[-1] if path else -1, f"{name}/{part}")
            if edge not in self._children:
                self._children[edge] = next(self._numbers)
            path = (*path, self._children[edge])
        return path

    def request(self, at_s: float, path: tuple[int, ...]) -> TraceRequest:
        """Request of a path."""
        return TraceRequest(at_s, tuple(map(self._keys.key, path)))


_Session = Iterator[tuple[float, tuple[int, ...]]]
"""Prompts of one session, with their times."""


def _merged(prompts: _Prompts, sessions: Iterator[_Session], requests: int) -> list[TraceRequest]:
    """First ``count`` requests of all sessions in the order of time. A session begins when its time is reached."""
    waiting: list[tuple[float, int, tuple[int, ...], _Session]] = []
    trace: list[TraceRequest] = []
    for number, session in enumerate(sessions):
        at_s, path = next(session)
        while waiting and waiting[0][0] <= at_s and len(trace) < requests:
            due_s, old, due, rest = heapq.heappop(waiting)
            trace.append(prompts.request(due_s, due))
            for again_s, longer in itertools.islice(rest, 1):
                heapq.heappush(waiting, (again_s, old, longer, rest))
        heapq.heappush(waiting, (at_s, number, path, session))
        if len(trace) == requests:
            break
    return trace


def agents(seed: int, requests: int) -> list[TraceRequest]:
    """Agents of twelve kinds; each kind shares its tools' description. Short pauses, and some steps are undone."""
    chance, prompts = random.Random(seed), _Prompts()
    kinds = [prompts.extended((), f"tools of kind {kind}", chance.randint(6, 30)) for kind in range(12)]

    def session(number: int, begin_s: float) -> _Session:
        path, at_s = prompts.extended(chance.choice(kinds), f"task {number}", chance.randint(1, 3)), begin_s
        for step in range(chance.randint(3, 25)):
            yield at_s, path
            at_s += chance.lognormvariate(2.0, 0.8)
            kept = path if chance.random() > 0.08 else path[: -chance.randint(1, 4)]  # noqa: PLR2004 - one in twelve
            path = prompts.extended(kept, f"step {number}.{step}", chance.randint(1, 4))

    return _merged(prompts, (session(number, 3.0 * number) for number in itertools.count()), requests)


def retrieval(seed: int, requests: int) -> list[TraceRequest]:
    """Questions over 1,500 documents of unequal popularity; the document is first, so its chunks are shared."""
    chance, prompts = random.Random(seed), _Prompts()
    system = prompts.extended((), "system", 2)
    lengths = [chance.randint(4, 24) for _ in range(1500)]
    fame = [1 / (rank + 3) for rank in range(len(lengths))]

    def question(number: int) -> _Session:
        path = system
        for document in chance.choices(range(len(lengths)), fame, k=chance.choice([1, 1, 2])):
            path = prompts.extended(path, f"document {document}", lengths[document])
        yield 0.5 * number, prompts.extended(path, f"question {number}", 1)

    return _merged(prompts, map(question, itertools.count()), requests)


def chat(seed: int, requests: int) -> list[TraceRequest]:
    """Conversations with long pauses; and, in floods, long prompts that are never repeated."""
    chance, prompts = random.Random(seed), _Prompts()

    def session(number: int, begin_s: float) -> _Session:
        if number // 40 % 3 == 2:  # noqa: PLR2004 - 40 of 120
            yield begin_s, prompts.extended((), f"one shot {number}", chance.randint(15, 50))
            return
        path, at_s = prompts.extended((), f"persona {number % 5}", 1), begin_s
        for turn in range(chance.randint(1, 14)):
            path = prompts.extended(path, f"turn {number}.{turn}", chance.randint(1, 5))
            yield at_s, path
            at_s += chance.lognormvariate(4.0, 1.0)

    return _merged(prompts, (session(number, 2.0 * number) for number in itertools.count()), requests)


def slow_chat(seed: int, requests: int) -> list[TraceRequest]:
    """Conversations with pauses of hours: 4,000 requests last a week."""
    chance, prompts = random.Random(seed), _Prompts()

    def session(number: int, begin_s: float) -> _Session:
        path, at_s = prompts.extended((), f"persona {number % 5}", 1), begin_s
        for turn in range(chance.randint(1, 14)):
            path = prompts.extended(path, f"turn {number}.{turn}", chance.randint(1, 5))
            yield at_s, path
            at_s += chance.lognormvariate(9.2, 1.0)

    return _merged(prompts, (session(number, 1000.0 * number) for number in itertools.count()), requests)


def daily(seed: int, requests: int) -> list[TraceRequest]:
    """Days of 320 requests: a hundred reports at nearly one time of each day, and prompts that are never repeated.

    A short trace has four days, with fewer requests each.
    """
    chance, prompts = random.Random(seed), _Prompts()
    day_requests = min(320, requests // 4)
    again = day_requests * 100 // 320
    reports = [prompts.extended((), f"report {number}", chance.randint(5, 40)) for number in range(again)]
    asked: list[tuple[float, tuple[int, ...]]] = []
    for day in range(requests // day_requests + 1):
        asked += [(86400.0 * day + chance.gauss(36000, 1800), report) for report in reports]
        for number in range(day_requests - again):
            once = prompts.extended((), f"one shot {day}.{number}", chance.randint(5, 30))
            asked.append((86400.0 * day + chance.uniform(20000, 80000), once))
    return [prompts.request(at_s, path) for at_s, path in sorted(asked)[:requests]]


WORKLOADS: Mapping[str, Callable[[int, int], list[TraceRequest]]] = {
    "agents": agents,
    "retrieval": retrieval,
    "chat and floods": chat,
    "slow chat": slow_chat,
    "daily reports": daily,
}
"""Name -> a function of a seed and a number of requests."""
