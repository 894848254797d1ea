"""Several workers of one model: what they hold in common, and what another number of them can use."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_process import EngineProcess
from vllm_setups import ARGUMENTS, prompts

pytestmark = pytest.mark.long

TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two workers on a machine with one node of memory: vLLM's own choice of cores has none for the second."""


@pytest.mark.parametrize(("model", "copies"), [("deepseek", 2), ("llama", 1)])
def test_vllm_counts_the_workers_with_equal_pages(models: Path, tmp_path: Path, model: str, copies: int) -> None:
    """With latent attention the KV memories of two workers are equal, byte by byte; with divided heads they differ.

    tierkv stores one copy where vLLM counts two.
    """
    sizes = {"block_size": 16, "num_gpu_blocks_override": 100} if model == "deepseek" else {}
    arguments = {**ARGUMENTS, **TWO_WORKERS, **sizes, "model": str(models / model)}
    with EngineProcess(arguments, tmp_path / "log", UNBOUND) as engine:
        engine.call("vllm_scenarios:serve", prompts=prompts("equal", 3))
        assert engine.call("vllm_ranks:copies") == copies
        assert len(set(engine.call("vllm_ranks:kv_digests"))) == 3 - copies
