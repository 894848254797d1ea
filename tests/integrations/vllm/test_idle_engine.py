"""An engine without requests steps on until what it has computed lies where others can find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, objects_after, objects_in, prompts

LONG_TOKENS = 450
CHUNKS = LONG_TOKENS // BLOCK_TOKENS
ASKED = 2


def setup_over(seam: Seam, folder: Path) -> EngineSetup:
    """An engine over host memory and a folder, to which one chunk at a time may be on its way."""
    tier = {"backend": "fsspec", "url": f"file://{folder}", "queue_bytes_max": 1}
    stack = {"host": {"capacity": "16MiB"}, "tiers": [tier], "lookup": {"recompute": "off"}}
    return EngineSetup(seam, stack, arguments={"num_gpu_blocks_override": 60})


def ask(engine: EngineProcess, seed: str, **options: Any) -> None:
    """Prompts that end with the step that computes them: all of their chunks are still to be stored."""
    engine.call("vllm_scenarios:serve_only", prompts=prompts(seed, ASKED, LONG_TOKENS), tokens=1, **options)


def test_vllm_wants_steps_until_everything_is_down(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """Its scheduler has no request, but reports pending work until every chunk is written."""
    with start_engine(setup_over(seam, tmp_path)) as engine:
        ask(engine, "steps")
        assert objects_in(tmp_path) < ASKED * CHUNKS, "one at a time: some of them have to wait"
        engine.call("vllm_scenarios:settle")
        assert objects_after(tmp_path, ASKED * CHUNKS) == ASKED * CHUNKS
        steps = engine.call("vllm_scenarios:steps_until_idle")
        assert steps == 0, "with nothing left to do it rests"


@pytest.mark.long
def test_an_idle_server_finishes_what_it_has_begun(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """A prefill server may be idle for hours: its engine must write chunks without waiting for the next request."""
    with start_engine(setup_over(seam, tmp_path), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as engine:
        ask(engine, "idle")
        assert objects_after(tmp_path, ASKED * CHUNKS) == ASKED * CHUNKS
