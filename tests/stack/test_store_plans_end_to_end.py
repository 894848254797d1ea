"""Store plans over a real stack and a real model: the plan changes when chunks are stored, and no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stack_bed import ANSWER, ENGINE, opened, prompts_of, serve, stack_config

from tierkv.errors import ConfigError
from tierkv.reference.engine import Engine
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineCapabilities

pytestmark = pytest.mark.needs_torch

Expected = Callable[..., list[list[int]]]


def lazy_stack(place: Path) -> Stack:
    """A stack that stores blocks shortly before they are reused, for an engine that shows its free blocks."""
    config = stack_config(place, chunk={"blocks": 1}, store={"plan": "lazy"})
    spec = replace(ENGINE.engine_spec(), capabilities=EngineCapabilities(shows_free_blocks=True))
    return open_stack(config, spec)


def test_eager_changes_no_answer(tmp_path: Path, expected: Expected) -> None:
    """One step later is early enough: a second engine with an empty pool finds all chunks."""
    prompts = prompts_of(31, 4)
    with opened(stack_config(tmp_path, store={"plan": "eager"})) as stack:
        assert serve(stack, prompts) == expected(prompts)
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["host"] >= 112 + 3 * 72


def test_lazy_stores_what_the_pool_is_about_to_lose(tmp_path: Path, expected: Expected) -> None:
    """The pool holds 39 blocks and the prompts need 65. Blocks that it loses are found in the tiers, and less is stored
    than was computed.
    """
    prompts = prompts_of(32, 6, shared=16)
    with lazy_stack(tmp_path) as stack:
        engine = Engine(ENGINE, connector=stack)
        stack.register_free_queue(engine.block_pool.free_queue, ENGINE.max_batched_tokens)
        for _ in range(2):
            answers = [list(record.output_tokens) for record in engine.generate(prompts, ANSWER)]
            assert answers == expected(prompts)
        assert stack.metrics.counters.chunks_stored
        assert stack.metrics.counters.tokens_loaded


def test_request_level_changes_no_answer(tmp_path: Path, expected: Expected) -> None:
    """Loaded chunks are offered again; chunks still in the host tier are not stored twice."""
    prompts = prompts_of(33, 4)
    with opened(stack_config(tmp_path, store={"policy": "request_level"})) as stack:
        assert serve(stack, prompts) == expected(prompts)
        stored = stack.metrics.counters.chunks_stored
        assert serve(stack, prompts) == expected(prompts)
        assert stack.metrics.counters.tokens_loaded["host"]
        assert stack.metrics.counters.chunks_stored - stored < stored


def test_an_engine_that_does_not_show_its_free_blocks(tmp_path: Path) -> None:
    """Lazy storing would store nothing: the engine is refused at once, and the error names a valid plan."""
    with pytest.raises(ConfigError, match=r'does not show its free blocks .* use "immediate" or "eager"'):
        open_stack(stack_config(tmp_path, chunk={"blocks": 1}, store={"plan": "lazy"}), ENGINE.engine_spec())


def test_lazy_with_chunks_of_several_blocks(tmp_path: Path) -> None:
    """Nothing is open when the error is raised: the same storage can be opened right after it."""
    spec = replace(ENGINE.engine_spec(), capabilities=EngineCapabilities(shows_free_blocks=True))
    with pytest.raises(ConfigError, match=r"has 2 of them: set chunk\.blocks = 1"):
        open_stack(stack_config(tmp_path, store={"plan": "lazy"}), spec)
    open_stack(stack_config(tmp_path), spec).close()
