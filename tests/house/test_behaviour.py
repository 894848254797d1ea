"""Every numbered case of the specification has a test that carries its identifier, and no test carries another one."""

from __future__ import annotations

from pathlib import Path

import behaviour
import pytest

CASES = {case: text for section in behaviour.sections() for case, text in section.cases.items()}
TESTS = behaviour.cases_tested(behaviour.ROOT)


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test(case: str) -> None:
    """A case that nothing tests is a wish."""
    assert TESTS.get(case), f"{case} ({CASES[case]}) has no test: name one test_{case.lower()}_..."


def test_no_test_carries_an_unknown_case() -> None:
    """A typing error in a name would hide that a case has no test."""
    assert not TESTS.keys() - CASES.keys()


def test_the_specification_is_whole() -> None:
    """The list itself may lose no case: S1 to S122 and D1 to D9."""
    assert {f"S{i}" for i in range(1, 123)} | {f"D{i}" for i in range(1, 10)} <= CASES.keys()


def test_a_missing_test_is_noticed(tmp_path: Path) -> None:
    """The check can fail: where there are no tests, no case has one."""
    assert behaviour.cases_tested(tmp_path) == {}


def test_identifiers_are_read_from_names() -> None:
    """One test may cover several cases; other numbers in its name are no cases."""
    assert behaviour.ids_of("test_s77_d5_the_last_chunk") == ["S77", "D5"]
    assert behaviour.ids_of("test_two_s3_servers") == []
