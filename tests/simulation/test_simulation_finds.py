"""Deliberate breaks must be found: a simulation that misses one proves nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from simulation.breaks.defects import DEFECTS, MODULES, PAGE, page
from simulation.breaks.registry import BREAKS, SEEDS, Break

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("broken", [pytest.param(one, id=one.name) for one in BREAKS])
def test_it_is_found(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each break is one careless line in tierkv. Few seeds find it, by the invariant that it concerns."""
    broken.apply(monkeypatch)
    findings = broken.play()
    assert broken.finds in findings, f"{SEEDS} seeds of {broken.scenario!r} have found {findings}"


def test_there_are_enough_of_them() -> None:
    """At least one of each kind exists: fences, slots, bytes, completions, deadlines, events, capacity, durability."""
    assert {one.apply.__module__ for one in BREAKS} == {module.__name__ for module in MODULES}
    assert len(BREAKS) >= 60
    assert len({one.name for one in BREAKS}) == len(BREAKS)


@pytest.mark.parametrize("path", sorted({test for defect in DEFECTS for test in defect.tests}))
def test_direct_tests_of_defects_exist(path: str) -> None:
    """The table names tests, which may be renamed."""
    module, name = path.split("::")
    tree = ast.parse((TESTS / module).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_defect_is_found() -> None:
    """A defect without a test could come back."""
    assert not [defect.what for defect in DEFECTS if not defect.tests]
    assert {name for defect in DEFECTS for name in defect.breaks} <= {one.name for one in BREAKS}


def test_the_page_has_the_present_table() -> None:
    """`python -m simulation.breaks.defects`, in `tests`, writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
