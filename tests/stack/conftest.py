"""Fixtures: expected answers without a stack, and fault injection."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stack_bed import ENGINE, Faults, serve

from tierkv.reference.configs import EngineConfig


@pytest.fixture(scope="session")
def expected() -> Callable[..., list[list[int]]]:
    """Answers without tierkv, computed once per prompt."""
    known: dict[str, list[list[int]]] = {}

    def answers(prompts: list[list[int]], config: EngineConfig = ENGINE) -> list[list[int]]:
        question = repr((prompts, config))
        if question not in known:
            known[question] = serve(None, prompts, config)
        return known[question]

    return answers


@pytest.fixture
def faults() -> Faults:
    """Faults for one test."""
    return Faults()
