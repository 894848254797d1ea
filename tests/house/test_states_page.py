"""The drawing of the state machines says what the tables say: it is read back, arrow by arrow."""

from __future__ import annotations

import re
from enum import Enum
from types import ModuleType

import pytest
import states

from tierkv.dispatch import breaker
from tierkv.manager.host import chunk_state
from tierkv.manager.lower import tier_phase
from tierkv.scheduler.load import stream_state
from tierkv.scheduler.requests import request_state


def read_back(drawing: str) -> states.Arrows:
    """The arrows of a drawing, found by where they begin and end."""
    header, rails, *rows = drawing.splitlines()
    middles = [match.start() for match in re.finditer(r"\|", rails)]
    names = header.split()
    assert len(names) == len(middles)
    name_at = dict(zip(middles, names, strict=True))
    found: states.Arrows = {}
    for row in rows[:-1]:
        if loop := re.search(r"@ ([a-z, ]+?)(?= {2,}|\s*\||$)", row):
            name = name_at[loop.start()]
            found[name, name] = loop[1].split(", ")
            continue
        arrow = re.search(r"<?-+ ?([a-z][a-z, ]*) ?-+>?|<- ([a-z, ]+) -|- ([a-z, ]+) ->", row)
        assert arrow, row
        left, right = name_at[arrow.start() - 1], name_at[arrow.end()]
        text = (arrow[1] or arrow[2] or arrow[3]).strip()
        before, after = (left, right) if arrow[0].endswith(">") else (right, left)
        found[before, after] = text.split(", ")
    return found


@pytest.mark.parametrize(
    ("enum", "table"),
    [
        (chunk_state.ChunkState, chunk_state.TRANSITIONS),
        (request_state.RequestState, request_state.TRANSITIONS),
        (stream_state.StreamState, stream_state.STREAM_TRANSITIONS),
        (tier_phase.TierPhase, tier_phase.TRANSITIONS),
        (breaker.State, breaker.TABLE),
    ],
)
def test_the_drawing_is_the_table(enum: type[Enum], table: states.Table) -> None:
    """A reader follows arrows; one that is missing, turned round or ends in the wrong column is misleading."""
    drawing = states.drawing([state.value for state in enum], states.arrows(table))
    assert read_back(drawing) == states.arrows(table)


def test_every_state_has_its_meaning() -> None:
    """The names alone explain little."""
    machines: list[tuple[ModuleType, type[Enum]]] = [
        (chunk_state, chunk_state.ChunkState),
        (request_state, request_state.RequestState),
        (stream_state, stream_state.StreamState),
        (tier_phase, tier_phase.TierPhase),
        (breaker, breaker.State),
    ]
    for module, enum in machines:
        assert set(states.meanings(module, enum)) == {state.value for state in enum}


def test_a_changed_table_changes_the_page() -> None:
    """The check that pages are current can fail: the page is made from the tables, not from a copy."""
    table = dict(chunk_state.TRANSITIONS)
    del table[chunk_state.ChunkState.READY, chunk_state.ChunkEvent.EVICTED]
    shorter = states.section("A chunk in the host tier", chunk_state, chunk_state.ChunkState, table)
    assert shorter not in states.body()
    whole = states.section("A chunk in the host tier", chunk_state, chunk_state.ChunkState, chunk_state.TRANSITIONS)
    assert whole in states.body()
