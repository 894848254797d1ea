"""Log of one stack: events become log lines, at a limited rate."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from tierkv.logs.definitions import LogEvent, Rate

LOGGER = "tierkv.stack"
"""Name of the logger that receives all lines."""

INTERVAL_S = 60.0
"""Default of the seconds between two lines of one kind."""

INTERVAL_MAX_S = 3600.0
"""Longest such time, of a kind that goes on."""

KINDS_MAX = 1024
"""Kinds of lines that are limited separately. Further ones share one limit per event."""

VALUE_CHARS_MAX = 700
"""Characters of one value in a line."""

AGE = "seconds_ago"
"""Field of a line about an event that is not new: its time before the line."""

AGE_MIN_S = 1.0

_PLAIN = re.compile(r"[\w.,:;/@%+*()\[\]-]+", re.ASCII)


@dataclass(slots=True)
class _Kind:
    """Lines of one event, tier and detail. Times in seconds on the log's clock."""

    event: LogEvent
    """Definition."""
    interval_s: float
    """Time from the latest line to the next."""
    next_s: float = -math.inf
    """Time from which the next line may be written."""
    suppressed: int = 0
    """Events since the latest line."""
    fields: dict[str, object] = field(default_factory=dict)
    """Fields of the latest suppressed event."""
    number: int = 0
    """Number of the latest suppressed event among all."""
    at_s: float = 0.0
    """Time of the latest suppressed event."""


class StackLog:
    """Writes the first event of each kind, and then one line per interval with the number of those between.

    A kind is an event with its tier and, for failures, its verb. Any thread. No lock is held while a line is written.

    Args:
        clock: seconds, monotonic.
        interval_s: seconds between two lines of one kind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._logger = logging.getLogger(LOGGER)
        self._lock = threading.Lock()  # guards the kinds, never a write
        self._kinds: dict[tuple[str, str, str], _Kind] = {}
        self._num_suppressed = self._number = 0

    def report(self, event: LogEvent, /, *, kind: str = "", **fields: object) -> None:
        """Report an event.

        Args:
            event: its definition.
            kind: detail that is limited separately.
            fields: a value for each field of the definition; those that are missing are left out of the line.
        """
        now_s = self._clock()
        with self._lock:
            state = self._kind_of(event, str(fields.get("tier", "")), kind)
            if now_s < state.next_s:
                if event.rate is Rate.ONCE:
                    return
                self._num_suppressed += 1
                self._number += 1
                state.suppressed += 1
                state.fields, state.number, state.at_s = fields, self._number, now_s
                return
            suppressed = self._begin_line(state, now_s)
        self._write(event, fields, suppressed)

    def report_suppressed(self, *, all_kinds: bool = False) -> None:
        """Write a line for each kind whose interval is over and that has suppressed events; the latest one's fields.

        Args:
            all_kinds: also for those whose interval is not over, because the log ends.
        """
        if not self._num_suppressed:
            return
        now_s = self._clock()
        with self._lock:
            due = [
                (
                    state.number,
                    state.event,
                    _dated(state.fields, now_s - state.at_s),
                    self._begin_line(state, now_s) - 1,
                )
                for state in self._kinds.values()
                if state.suppressed and (all_kinds or now_s >= state.next_s)
            ]
        for _, event, fields, suppressed in sorted(due, key=itemgetter(0)):
            self._write(event, fields, suppressed)

    def _kind_of(self, event: LogEvent, tier: str, detail: str) -> _Kind:
        name = (event.name, tier, detail)
        if name not in self._kinds and len(self._kinds) >= KINDS_MAX:
            name = (event.name, "", "")
        return self._kinds.setdefault(name, _Kind(event, self._interval_s))

    def _begin_line(self, state: _Kind, now_s: float) -> int:
        """Return the number of events that the line replaces."""
        suppressed = state.suppressed
        self._num_suppressed -= suppressed
        state.suppressed = 0
        if state.event.rate is Rate.ONCE:
            state.interval_s = math.inf
        elif state.event.rate is Rate.GROWING and suppressed:
            state.interval_s = max(self._interval_s, min(2 * state.interval_s, INTERVAL_MAX_S))
        else:
            state.interval_s = self._interval_s
        state.next_s = now_s + state.interval_s
        state.fields = {}
        return suppressed

    def _write(self, event: LogEvent, fields: Mapping[str, object], suppressed: int) -> None:
        if not self._logger.isEnabledFor(event.level):
            return
        known = {"event": event.name} | {name: fields[name] for name in (*event.fields, AGE) if name in fields}
        known["suppressed"] = suppressed
        pairs = " ".join(f"{name}={_shown(value)}" for name, value in known.items() if value is not None)
        with contextlib.suppress(Exception):  # a filter or handler of the user may raise; no line is worth the engine
            self._logger.log(event.level, "%s: %s", event.text, pairs, extra=known)


def _dated(fields: Mapping[str, object], age_s: float) -> Mapping[str, object]:
    """Fields of an event, with its age: a line at the end must not look like a failure at the end."""
    return {**fields, AGE: round(age_s)} if age_s >= AGE_MIN_S else fields


def _shown(value: object) -> str:
    """Return a value as text without line breaks, in quotes unless it is one plain word."""
    if isinstance(value, float):
        value = f"{value:.3g}" if value < 1000 else f"{value:.0f}"  # noqa: PLR2004 - more digits than a reader needs
    text = str(value)[:VALUE_CHARS_MAX]
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
