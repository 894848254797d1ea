"""Rows of first tokens, made from answers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.models.first_tokens import row, same_answers


def answer(ttft_s: float, cached: int, *tokens: int) -> dict[str, Any]:
    """As an engine's process writes it down."""
    return {"ttft_s": ttft_s, "cached": cached, "tokens": list(tokens)}


COMPUTED = {"prose": answer(2.0, 0, 1, 2), "code": answer(4.0, 0, 3, 4), "JSON": answer(1.0, 0, 5, 6)}
LOADED = {"prose": answer(0.1, 96, 1, 2), "code": answer(0.1, 96, 3, 9), "JSON": answer(0.2, 64, 5, 6)}


def test_a_ratio_is_of_one_text() -> None:
    """The median of one side over the median of the other would compare different texts."""
    found = row("from disk", LOADED, "computed", COMPUTED, {"those computed": COMPUTED})
    assert (found.measured, found.limit) == (100, 2000)
    assert list(found.ratios) == pytest.approx([0.05, 0.025, 0.2])
    assert found.ratio == pytest.approx(0.05)
    assert found.extra["cached tokens of a prompt"] == 96


def test_one_other_token_is_another_answer() -> None:
    """A wrong KV byte often changes the last tokens only: counting equal tokens would hide it."""
    assert same_answers(LOADED, COMPUTED) == pytest.approx(200 / 3)
    assert same_answers(COMPUTED, COMPUTED) == 100
