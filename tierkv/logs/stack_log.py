"""Log of one stack: events become log lines, at a limited rate."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias, cast

from tierkv.logs.definitions import PLUGIN_NOTE, LogEvent, Rate

LOGGER = "tierkv.stack"
"""Name of the logger that receives all lines."""

INTERVAL_S = 60.0
"""Default of the seconds between two lines of one kind."""

INTERVAL_MAX_S = 3600.0
"""Longest such time, of a kind that goes on. A state that has lasted for one interval is written without it."""

CHANGES_AT_ONCE = 4
"""Lines about changes of a state that are written at once after a quiet time; further ones are limited as others."""

KINDS_MAX = 1024
"""Kinds of lines that are limited separately. Further ones share one limit per event."""

VALUE_CHARS_MAX = 700
"""Characters of one value in a line."""

AGE = "seconds_ago"
"""Field of a line about an event that is not new: its time before the line."""

AGE_MIN_S = 1.0

Write: TypeAlias = Callable[[Mapping[str, object]], None]
"""Writes a line of a plugin with further fields; on any thread."""

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
    at_s: float = -math.inf
    """Time of the latest event."""

    @property
    def is_of_state(self) -> bool:
        """Whether its latest line is the present state."""
        return self.event.rate is Rate.STATE


class _Line(NamedTuple):
    """A line to write."""

    number: int
    """Number of its event among all."""
    event: LogEvent
    """Definition."""
    fields: Mapping[str, object]
    """Fields of the event."""
    suppressed: int
    """Events that it replaces."""


class StackLog:
    """Writes the first event of each kind, and then one line per interval with the number of those between.

    Of changes of a state, it writes the first :data:`CHANGES_AT_ONCE` as they happen. A kind is an event with its tier
    and, for failures, its verb. Any thread. No lock is held while a line is written.

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
            tier = str(fields.get("tier", ""))
            state = self._kind_of(event, tier, kind)
            if state.is_of_state and now_s >= (quiet_s := state.at_s + self._interval_s):
                state.next_s = min(state.next_s, quiet_s)  # after a quiet interval, what was before no longer counts
            state.at_s = now_s
            if now_s < state.next_s:
                if event.rate is Rate.ONCE:
                    return
                self._num_suppressed += 1
                self._number += 1
                state.suppressed += 1
                state.fields, state.number = fields, self._number
                return
            # An idle engine writes no late lines: the last line would be about an outage whose end is written already.
            earlier = self._begin_lines(self._states_of(tier, state), now_s) if state.is_of_state else []
            suppressed = self._begin_line(state, now_s)
        self._write_all(earlier)
        self._write(event, fields, suppressed)

    def note(self, tier: str, text: str, write: Write) -> None:
        """Report a line of a plugin. text: its format, which is its kind; write: writes it, with the fields given."""
        self.report(PLUGIN_NOTE, kind=text, tier=tier, write=write)

    def report_suppressed(self, *, all_kinds: bool = False) -> None:
        """Write a line for each kind whose interval is over and that has suppressed events; the latest one's fields.

        Args:
            all_kinds: also for those whose interval is not over, because the log ends.
        """
        if not self._num_suppressed:
            return
        now_s = self._clock()
        with self._lock:
            lines = self._begin_lines(self._due(math.inf if all_kinds else now_s), now_s)
        self._write_all(lines)

    def _due(self, now_s: float) -> list[_Kind]:
        """Return the kinds with a line to write.

        A tier's states come together: an outage without its end misleads. They do so as well when the latest has lasted
        for an interval, so a tier that flaps has few lines, and one that stays out of service has its line in time.
        """
        held_back = [(tier, state) for (_, tier, _), state in self._kinds.items() if state.suppressed]
        states = [(tier, state) for tier, state in held_back if state.is_of_state]
        latest_s: dict[str, float] = {}
        for tier, state in states:
            latest_s[tier] = max(latest_s.get(tier, state.at_s), state.at_s)
        due = {tier for tier, state in states if now_s >= min(state.next_s, latest_s[tier] + self._interval_s)}
        return [state for tier, state in held_back if (tier in due if state.is_of_state else now_s >= state.next_s)]

    def _states_of(self, tier: str, new: _Kind) -> list[_Kind]:
        """Return the other states of a tier with a line to write."""
        kinds = ((name, state) for (_, name, _), state in self._kinds.items() if state.suppressed)
        return [state for name, state in kinds if name == tier and state.is_of_state and state is not new]

    def _begin_lines(self, kinds: Iterable[_Kind], now_s: float) -> list[_Line]:
        """Return the lines about the latest suppressed event of each kind, in the order of the events."""
        lines = [
            _Line(
                state.number,
                state.event,
                _dated(state.fields, now_s - state.at_s),
                self._begin_line(state, now_s) - 1,
            )
            for state in kinds
        ]
        return sorted(lines, key=attrgetter("number"))

    def _kind_of(self, event: LogEvent, tier: str, detail: str) -> _Kind:
        name = (event.name, tier, detail)
        if name not in self._kinds and len(self._kinds) >= KINDS_MAX:
            name = (event.name, "", "")
        return self._kinds.setdefault(name, _Kind(event, self._interval_s))

    def _begin_line(self, state: _Kind, now_s: float) -> int:
        """Return the number of events that the line replaces."""
        suppressed = state.suppressed
        self._num_suppressed -= suppressed
        state.suppressed, state.fields = 0, {}
        if state.event.rate is Rate.ONCE:
            state.interval_s = math.inf
        elif suppressed:
            state.interval_s = max(self._interval_s, min(2 * state.interval_s, INTERVAL_MAX_S))
        else:
            state.interval_s = self._interval_s
        spare_s = (CHANGES_AT_ONCE - 1) * state.interval_s if state.is_of_state else 0.0
        state.next_s = max(state.next_s, now_s - spare_s) + state.interval_s
        return suppressed

    def _write_all(self, lines: Iterable[_Line]) -> None:
        for line in lines:
            self._write(line.event, line.fields, line.suppressed)

    def _write(self, event: LogEvent, fields: Mapping[str, object], suppressed: int) -> None:
        known = {"event": event.name} | {name: fields[name] for name in (*event.fields, AGE) if name in fields}
        known["suppressed"] = suppressed
        with contextlib.suppress(Exception):  # a filter or handler of the user may raise; no line is worth the engine
            if event is PLUGIN_NOTE:
                cast("Write", fields["write"])(known)
            elif self._logger.isEnabledFor(event.level):
                pairs = " ".join(f"{name}={_shown(value)}" for name, value in known.items() if value is not None)
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
