"""Time of requests by state, from the entries of a record: a sentence for one, and the slowest ones of all."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tierkv.recording.entries import Entry, opened_at_s

STATES = {
    "idle": "no question open",
    "asking": "asking tiers whether they have its chunks",
    "gathering": "reading chunks into host memory",
    "offered": "until the engine took the hit",
    "loading": "copying to the GPU",
    "running": "computing in the engine",
}
"""States of a request, in the words of a reader."""

SHORTEST_S = 0.0005
"""Shorter times are left out of the sentence."""


@dataclass(slots=True)
class RequestWaits:
    """Seconds of a request in each state, from its first question on."""

    request_id: str
    first_s: float
    """Time of the first question in the record's process."""

    first_at: str
    """The same on the clock of that machine, or an empty string if the record does not say."""

    seconds: dict[str, float] = field(default_factory=dict)
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    _since_s: float = 0.0

    @property
    def before_compute_s(self) -> float:
        """Time until the engine could compute: all but the state ``running``."""
        return sum(seconds for state, seconds in self.seconds.items() if state != "running")

    def add(self, entry: Entry) -> None:
        """Take a change of state, or the account at the end."""
        if entry["is"] == "request":
            self.seconds[entry["before"]] = self.seconds.get(entry["before"], 0.0) + entry["t"] - self._since_s
            self._since_s = entry["t"]
        elif entry["is"] == "finished":
            self.loaded_tokens = dict(entry["account"].get("loaded_tokens", {}))

    def describe(self) -> str:
        """Sentence with the longest time first."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = [f"{s:.3f} s {STATES.get(state, state)}" for state, s in longest if s >= SHORTEST_S]
        since = f" (at {self.first_at})" if self.first_at else ""
        return f"In all {sum(self.seconds.values()):.3f} s since its first question{since}: {'; '.join(parts)}."


def waits_of(entries: Iterable[Entry]) -> Iterator[RequestWaits]:
    """Yield the waits of each request of a record, at its end; those that have not ended follow.

    A process that is killed ends its requests without an entry: the next one's times start again at zero.
    """
    opened_s: float | None = None
    open_requests: dict[str, RequestWaits] = {}
    for entry in entries:
        if entry["is"] == "record":
            yield from open_requests.values()
            open_requests.clear()
            opened_s = opened_at_s(entry)
        elif entry["is"] in {"request", "finished"}:
            name, now = entry["r"], entry["t"]
            if name not in open_requests:
                open_requests[name] = RequestWaits(name, now, _clock(opened_s, now), _since_s=now)
            open_requests[name].add(entry)
            if entry["is"] == "finished":
                yield open_requests.pop(name)
    yield from open_requests.values()


def slowest(entries: Iterable[Entry], count: int) -> list[RequestWaits]:
    """Return the requests that waited longest before the engine could compute, the longest first."""
    return heapq.nlargest(count, waits_of(entries), key=lambda waits: waits.before_compute_s)


def longest_operation(entries: Iterable[Entry]) -> str:
    """Sentence about the operation of a tier that took longest, with its queue; empty where none is known whole."""
    began_s: dict[int, float] = {}
    longest_s, name = 0.0, ""
    for entry in entries:
        if entry["is"] == "record":
            began_s.clear()
        elif entry["is"] == "op":
            began_s.setdefault(entry["op"], entry["t"])
        elif entry["is"] == "op end" and entry["op"] in began_s:
            seconds = entry["t"] - began_s[entry["op"]]
            if seconds > longest_s:
                longest_s, name = seconds, f"{entry['tier']}, {entry['verb']} {entry['op']}"
    return f"The longest operation of a tier was {name}: {longest_s:.3f} s with its queue." if name else ""


def _clock(opened_s: float | None, after_s: float) -> str:
    if opened_s is None:
        return ""
    try:
        moment = datetime.fromtimestamp(opened_s + after_s, UTC)
    except (ValueError, OverflowError):  # beyond the calendar: the record is damaged
        return ""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
