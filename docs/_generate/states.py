"""The body of docs/reference/states.md: the literal tables of all state machines, as a picture and as a table.

A picture has a column per state, and arrows from state to state under the events that may cause them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from drawing import FOLDER, MARGIN, WIDTH, arrow, document, text, width_of

from tierkv.dispatch.health import breaker
from tierkv.manager.host import chunk_state
from tierkv.manager.lower import tier_phase
from tierkv.scheduler.load import stream_state
from tierkv.scheduler.requests import request_state

LEAD = """\
Five state machines carry everything that tierkv remembers: one per chunk in the host tier, one per request, one per
load that streams, one per lower tier, one per circuit breaker of a tier. Each is one literal table in one module. An
event that the table does not list raises `IllegalTransitionError` with the latest transitions of the item. In a
picture a column is a state. An arrow leads from each dot, a state before, to the state after. A ring marks events that
change nothing.
"""
_ROW = 34
"""Height of a row of a picture."""

Table = Mapping[Any, Enum]
"""(state before, event) -> state after; each machine has its own kinds of states and events."""
Arrows = dict[tuple[str, str], list[str]]


def arrows(table: Table) -> Arrows:
    """(state before, state after) -> the events that lead from one to the other, in the order of the table."""
    found: Arrows = {}
    for (before, event), after in table.items():
        found.setdefault((before.value, after.value), []).append(event.value)
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """Transitions that are drawn in one row: they end in one state, by the same events, from one side."""

    befores: tuple[str, ...]
    after: str
    events: tuple[str, ...]


def rows_of(states: list[str], found: Arrows) -> list[Row]:
    """Rows of a drawing, in the order of the table."""
    rows: dict[tuple[str, tuple[str, ...], int], list[str]] = {}
    for (before, after), events in found.items():
        start, stop = states.index(before), states.index(after)
        rows.setdefault((after, tuple(events), (start > stop) - (start < stop)), []).append(before)
    return [Row(tuple(befores), after, events) for (after, events, _), befores in rows.items()]


def drawing(title: str, states: list[str], found: Arrows) -> str:
    """The states as columns, the transitions as arrows between them: from each dot to the head."""
    step = (WIDTH - 2 * MARGIN) / len(states)
    middles = {state: MARGIN + step * (i + 0.5) for i, state in enumerate(states)}
    is_tight = any(width_of(state, small=True) + 4 > step for state in states)
    top = MARGIN + 18 + 22 * is_tight
    rows = rows_of(states, found)
    bottom = top + 12 + _ROW * len(rows) + 8
    parts = [f'<path d="M{x:.1f} {top + 4}V{bottom}" class="rail"/>' for x in middles.values()]
    for i, (state, x) in enumerate(middles.items()):
        y = top - 22 * (is_tight and i % 2 == 0)
        if y < top:
            parts.append(f'<path d="M{x:.1f} {y + 4}V{top + 4}" class="rail"/>')
        half = width_of(state, small=True) / 2
        parts.append(text(min(max(x, half), WIDTH - half), y, state, "small strong", "middle"))
    for number, row in enumerate(rows, start=1):
        parts += _row(row, middles, top + 6 + _ROW * number)
    description = "; ".join(f"{', '.join(row.befores)} to {row.after}: {', '.join(row.events)}" for row in rows)
    return document(title, description, "".join(parts), bottom + MARGIN)


def _row(row: Row, middles: Mapping[str, float], y: float) -> Iterator[str]:
    label, end = ", ".join(row.events), middles[row.after]
    half = width_of(label, small=True) / 2
    if row.befores == (row.after,):
        side = 1 if end + 14 + 2 * half <= WIDTH else -1
        yield f'<circle cx="{end:.1f}" cy="{y - 4:.1f}" r="5" class="loop b5"/>'
        yield text(end + 12 * side, y, label, "small", "start" if side > 0 else "end")
        return
    starts = [middles[before] for before in row.befores]
    far = max(starts, key=lambda start: abs(start - end))
    yield arrow(far, y, end + (2 if far > end else -2), y)
    for start in starts:
        yield f'<circle cx="{start:.1f}" cy="{y:.1f}" r="4" class="f0"/>'
    middle = (far + end) / 2
    yield text(min(max(middle, half + 2), WIDTH - half - 2), y - 7, label, "small", "middle")


def meanings(module: ModuleType, enum: type[Enum]) -> dict[str, str]:
    """The text under each member of an enumeration, where there is one."""
    tree = ast.parse(inspect.getsource(module))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == enum.__name__]
    found: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            name = ast.unparse(node.targets[0])
            if name in enum.__members__:
                found[enum[name].value] = " ".join(str(after.value.value).split())
    return found


@dataclass(frozen=True, slots=True)
class Machine:
    """One state machine: where its table is, and the file of its picture."""

    title: str
    stem: str
    module: ModuleType
    states: type[Enum]
    table: Table

    def picture(self) -> str:
        """The machine as SVG."""
        return drawing(self.title, [state.value for state in self.states], arrows(self.table))

    def section(self) -> str:
        """The machine's part of the page."""
        names, found, texts = (
            [state.value for state in self.states],
            arrows(self.table),
            meanings(self.module, self.states),
        )
        listing = [f"| {name} | {texts.get(name, '')} |" for name in names]
        rows = [f"| {before} | {', '.join(events)} | {after} |" for (before, after), events in found.items()]
        parts = [
            f"## {self.title}\n",
            f"Source: `{self.module.__name__}`.\n",
            f"![Its states and transitions, which the tables below list]({FOLDER}/{self.stem}.svg)\n",
            "| state | meaning |\n|---|---|\n" + "\n".join(listing) + "\n",
            "| before | events | after |\n|---|---|---|\n" + "\n".join(rows) + "\n",
        ]
        return "\n".join(parts)


MACHINES = (
    Machine("A chunk in the host tier", "state-chunk", chunk_state, chunk_state.ChunkState, chunk_state.TRANSITIONS),
    Machine("A request", "state-request", request_state, request_state.RequestState, request_state.TRANSITIONS),
    Machine(
        "A load that streams", "state-stream", stream_state, stream_state.StreamState, stream_state.STREAM_TRANSITIONS
    ),
    Machine("A lower tier", "state-tier", tier_phase, tier_phase.TierPhase, tier_phase.TRANSITIONS),
    Machine("The circuit breaker of a tier", "state-breaker", breaker, breaker.State, breaker.TABLE),
)

PICTURES: dict[str, Callable[[], str]] = {f"{FOLDER}/{machine.stem}.svg": machine.picture for machine in MACHINES}
"""Pictures by file, from docs/reference on."""


def body() -> str:
    """The page without its title."""
    return "\n".join([LEAD, *(machine.section() for machine in MACHINES)])
