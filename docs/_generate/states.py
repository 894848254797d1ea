"""The body of docs/reference/states.md: the literal tables of all state machines, as a drawing and as a table.

The drawing is text, so that it needs no program and no network to be seen: a column per state, an arrow per pair of
states, and over it what may cause it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping
from enum import Enum
from types import ModuleType
from typing import Any

from tierkv.dispatch import breaker
from tierkv.manager.host import chunk_state
from tierkv.manager.lower import tier_phase
from tierkv.scheduler.load import stream_state
from tierkv.scheduler.requests import request_state

LEAD = """\
Five state machines carry everything that tierkv remembers: one per chunk in the host tier, one per request, one per
load that streams, one per lower tier, one per circuit breaker of a tier. Each is one literal table in one module. An
event that the table does not list raises `IllegalTransitionError` with the latest transitions of the item. A column is
a state. An arrow leads from the state before to the state after.
"""

Table = Mapping[Any, Enum]
"""(state before, event) -> state after; each machine has its own kinds of states and events."""
Arrows = dict[tuple[str, str], list[str]]


def arrows(table: Table) -> Arrows:
    """(state before, state after) -> the events that lead from one to the other, in the order of the table."""
    found: Arrows = {}
    for (before, event), after in table.items():
        found.setdefault((before.value, after.value), []).append(event.value)
    return found


def drawing(states: list[str], found: Arrows) -> str:
    """The states as columns, the transitions as arrows between them."""
    widths = _widths(states, found)
    middles = [sum(widths[:i]) + widths[i] // 2 for i in range(len(states))]
    rails = _row(sum(widths), dict.fromkeys(middles, "|"))
    rows = [_row(sum(widths), {middle - len(s) // 2: s for s, middle in zip(states, middles, strict=True)}), rails]
    for (before, after), events in found.items():
        start, stop = middles[states.index(before)], middles[states.index(after)]
        text = ", ".join(events)
        if start == stop:
            rows.append(_row(sum(widths), {**dict.fromkeys(middles, "|"), start: "@ " + text}))
            continue
        left, right = min(start, stop), max(start, stop)
        line = f" {text} ".center(right - left - 1, "-")
        line = line[:-1] + ">" if stop > start else "<" + line[1:]
        rows.append(_row(sum(widths), {**dict.fromkeys(middles, "|"), left + 1: line}))
    return "\n".join([*rows, rails])


def _widths(states: list[str], found: Arrows) -> list[int]:
    """Columns wide enough for the names, for the text of every arrow between neighbours, and of every loop."""
    widths = [len(state) + 4 for state in states]
    for (before, after), events in found.items():
        first, last = sorted((states.index(before), states.index(after)))
        need = len(", ".join(events)) + 6
        if first == last:
            have = widths[first] // 2 + (widths[first + 1] // 2 if first + 1 < len(states) else 0)
            widths[first] += 2 * max(0, need - have)
        else:
            have = widths[first] // 2 + sum(widths[first + 1 : last]) + widths[last] // 2
            widths[first] += max(0, need - have)
            widths[last] += max(0, need - have)
    return widths


def _row(width: int, parts: Mapping[int, str]) -> str:
    cells = [" "] * (width + 80)
    for start, text in sorted(parts.items(), key=lambda part: len(part[1])):
        cells[start : start + len(text)] = text
    return "".join(cells).rstrip()


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


def section(title: str, module: ModuleType, states: type[Enum], table: Table) -> str:
    """One machine."""
    names, found, texts = [state.value for state in states], arrows(table), meanings(module, states)
    listing = [f"| {name} | {texts.get(name, '')} |" for name in names]
    rows = [f"| {before} | {', '.join(events)} | {after} |" for (before, after), events in found.items()]
    parts = [
        f"## {title}\n",
        f"Source: `{module.__name__}`. `@` marks an event that changes nothing.\n",
        f"```text\n{drawing(names, found)}\n```\n",
        "| state | meaning |\n|---|---|\n" + "\n".join(listing) + "\n",
        "| before | events | after |\n|---|---|---|\n" + "\n".join(rows) + "\n",
    ]
    return "\n".join(parts)


def body() -> str:
    """The page without its title."""
    chunk = section("A chunk in the host tier", chunk_state, chunk_state.ChunkState, chunk_state.TRANSITIONS)
    request = section("A request", request_state, request_state.RequestState, request_state.TRANSITIONS)
    stream = section("A load that streams", stream_state, stream_state.StreamState, stream_state.STREAM_TRANSITIONS)
    tier = section("A lower tier", tier_phase, tier_phase.TierPhase, tier_phase.TRANSITIONS)
    circuit = section("The circuit breaker of a tier", breaker, breaker.State, breaker.TABLE)
    return f"{LEAD}\n{chunk}\n{request}\n{stream}\n{tier}\n{circuit}"
