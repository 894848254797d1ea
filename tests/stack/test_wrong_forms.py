"""Arguments of a wrong form at the stack's own calls: a named error, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tierkv
from tierkv.errors import EngineProtocolError
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, Prompt, engine_spec

PROMPT = Prompt(1, 3)


@pytest.fixture
def engine() -> Iterator[HandEngine]:
    """Engine of a host tier, which has a prompt."""
    with tierkv.open_stack({"host": {"capacity": 16 * SLOT_BYTES}}, engine_spec()) as stack:
        engine = HandEngine(stack)
        engine.store(PROMPT)
        yield engine


@pytest.mark.parametrize("wrong", [None, 7, (), [PROMPT]])
def test_a_step_that_is_none(engine: HandEngine, wrong: Any) -> None:
    """The stack looks at a step before the scheduler does: for a rest."""
    with pytest.raises(EngineProtocolError, match="build_connector_meta: give a StepOutput"):
        engine.stack.build_connector_meta(wrong)
    assert engine.load(PROMPT) == PROMPT.chunks


@pytest.mark.parametrize("wrong", [None, {}, []])
def test_a_report_that_is_none(engine: HandEngine, wrong: Any) -> None:
    """An engine passes on None where no worker has reported."""
    with pytest.raises(EngineProtocolError, match=r"update_connector_output: .* is no report of a worker"):
        engine.stack.update_connector_output(wrong)
    assert engine.load(PROMPT) == PROMPT.chunks


@pytest.mark.parametrize("wrong", [None, {}, [], (None,)])
def test_instructions_that_are_none(engine: HandEngine, wrong: Any) -> None:
    """An engine passes on None where it has built no instructions, or what another connector has built."""
    worker = engine.stack.worker
    calls: dict[str, Callable[[Any], object]] = {
        "start_step": worker.start_step, "queue_stores": worker.queue_stores, "start": worker.start,
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(EngineProtocolError, match=f"^{name}: .* is no (instructions|job)"):
            call(wrong)
    assert engine.load(PROMPT) == PROMPT.chunks
