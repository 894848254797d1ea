"""A stack over a disk tier without its index log: the tier recognises its frames with the help of the stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stack_bed import opened, prompts_of, serve, stack_config

pytestmark = pytest.mark.needs_torch

PROMPTS = prompts_of(5, 2, shared=0)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_chunks_are_found_again(tmp_path: Path, expected: Callable[..., list[list[int]]], codec: str) -> None:
    """Chunks stored before the log was lost are loaded after it, whichever codec wrote them."""
    disk = stack_config(tmp_path)["tiers"][0]
    config = stack_config(tmp_path, tiers=[{**disk, "codec": codec}])
    with opened(config) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.flush(10.0)
    (log,) = (tmp_path / "disk").rglob("index.log")
    log.unlink()
    with opened(config) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["disk"] == 2 * 112
        assert not stack.metrics.counters.chunks_corrupt
