"""Several workers of one model: what they hold in common, and what another number of them can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import ARGUMENTS, EngineSetup, cached_of, prompts, tokens_of

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


@pytest.mark.parametrize("workers", [(1, 2), (2, 1)], ids=str)
def test_chunks_divided_by_heads_serve_another_number_of_workers(
    tmp_path: Path, workers: tuple[int, int], start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """One worker of two heads divides its pages in two; two workers, with a head each, have just these parts."""
    asked = prompts("heads", 3)
    disk = {"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack: dict[str, Any] = {"host": {"capacity": "16MiB"}, "tiers": [disk], "lookup": {"recompute": "off"}}
    answers = []
    for number in workers:
        chunk = {"parts": 2} if number == 1 else {}
        arguments = TWO_WORKERS if number == 2 else {}
        setup = EngineSetup("connector", {**stack, "chunk": chunk}, blocks_per_chunk=2, arguments=arguments)
        with start_engine(setup, UNBOUND) as engine:
            answers.append(engine.call("vllm_scenarios:serve", prompts=asked))
            assert engine.call("vllm_scenarios:flush")
    assert [cached_of(served) for served in answers] == [[0] * 3, [192] * 3]
    assert tokens_of(answers[0]) == tokens_of(answers[1]) == plain_tokens("llama", asked, 16)
