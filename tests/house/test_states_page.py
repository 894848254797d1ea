"""The pictures of the state machines show what the tables say: they are read back, arrow by arrow."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree as ET

import pytest
import states

from tierkv.manager.host import chunk_state


def read_back(picture: str) -> states.Arrows:
    """The arrows of a picture, found by where they begin and end."""
    elements = list(ET.fromstring(picture))
    middles = [float(one.get("d", "")[1:].split()[0]) for one in elements if one.get("class") == "rail"]
    names = [one.text or "" for one in elements if one.get("class") == "small strong"]
    name_at = dict(zip(sorted(set(middles)), names, strict=True))
    found: states.Arrows = {}
    starts: list[str] = []
    end = None
    for one in elements:
        if one.tag.endswith("circle"):
            starts.append(nearest(name_at, float(one.get("cx", 0))))
        elif one.tag.endswith("polygon"):
            end = nearest(name_at, float(one.get("points", "").split(",")[0]))
        elif one.get("class") == "small":
            for start in starts:
                found[start, end or start] = (one.text or "").split(", ")
            starts, end = [], None
    return found


def nearest(name_at: dict[float, str], x: float) -> str:
    """The state whose column is at a position."""
    return name_at[min(name_at, key=lambda middle: abs(middle - x))]


@pytest.mark.parametrize("machine", states.MACHINES, ids=lambda machine: machine.stem)
def test_the_drawing_is_the_table(machine: states.Machine) -> None:
    """A reader follows arrows; one that is missing, turned round or ends in the wrong column is misleading."""
    assert read_back(machine.picture()) == states.arrows(machine.table)


def test_a_turned_arrow_is_noticed() -> None:
    """The check can fail: events of a transition that the table has in the other direction are found there."""
    table = {(chunk_state.ChunkState.GONE, chunk_state.ChunkEvent.EVICTED): chunk_state.ChunkState.READY}
    picture = states.drawing("turned", [state.value for state in chunk_state.ChunkState], states.arrows(table))
    assert read_back(picture) == {("gone", "ready"): ["evicted"]}


def test_every_state_has_its_meaning() -> None:
    """The names alone explain little."""
    for machine in states.MACHINES:
        assert set(states.meanings(machine.module, machine.states)) == {state.value for state in machine.states}


def test_a_changed_table_changes_the_page() -> None:
    """The check that pages are current can fail: the page is made from the tables, not from a copy."""
    whole = states.MACHINES[0]
    table = dict(chunk_state.TRANSITIONS)
    del table[chunk_state.ChunkState.READY, chunk_state.ChunkEvent.EVICTED]
    shorter = dataclasses.replace(whole, table=table)
    assert shorter.section() not in states.body()
    assert shorter.picture() != whole.picture()
    assert whole.section() in states.body()
