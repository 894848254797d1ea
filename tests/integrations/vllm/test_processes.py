"""The engine in a process of its own, and its workers in others: shared memory, orderly ends, and kill -9."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineError, EngineProcess, PlainTokens, StartEngine, all_processes, processes_of
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

pytestmark = pytest.mark.long

CACHED = 192
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two workers on a machine with one node of memory: vLLM's own choice of cores has none for the second."""


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """A disk tier."""
    return {"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}


def setup_over(seam: Seam, tier: dict[str, Any], **arguments: Any) -> EngineSetup:
    """An engine over host memory and that tier."""
    stack = {"host": {"capacity": "16MiB"}, "tiers": [tier], "lookup": {"recompute": "off"}}
    return EngineSetup(seam, stack, blocks_per_chunk=2, arguments=arguments)


def second_pass(engine: EngineProcess, asked: list[list[int]]) -> list[dict[str, Any]]:
    """Answers with an empty device, after the engine has ended the stores of the first pass by itself."""
    answers: list[dict[str, Any]] = []
    for _ in range(20):
        engine.call("vllm_scenarios:forget")
        answers = engine.call("vllm_scenarios:serve_only", prompts=asked)
        if cached_of(answers) == [CACHED] * len(asked):
            break
    return answers


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_an_engine_in_a_process_of_its_own_serves_from_the_tiers(
    seam: Seam, model: str, disk: dict[str, Any], start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """VLLM's default: scheduler and workers in processes of their own."""
    asked = prompts("apart", 3)
    stack = {"host": {"capacity": "16MiB"}, "tiers": [disk], "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": 80}
    setup = EngineSetup(seam, stack, model=model, blocks_per_chunk=2, arguments=arguments)
    with start_engine(setup, APART) as engine:
        first = engine.call("vllm_scenarios:serve_only", prompts=asked)
        second = second_pass(engine, asked)
    with start_engine(setup, APART) as engine:  # the orderly end of the first has brought everything down
        third = engine.call("vllm_scenarios:serve_only", prompts=asked)
    assert cached_of(first) == [0] * 3
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens(model, asked, 16)


def test_two_workers_share_the_host_tier(
    seam: Seam, disk: dict[str, Any], start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """Tensor parallel: each worker holds half of the heads, and a chunk is whole only with the parts of both."""
    asked = prompts("two workers", 3)
    with start_engine(setup_over(seam, disk, **TWO_WORKERS), UNBOUND) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        engine.call("vllm_scenarios:forget_host")
        third = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(first) == [0] * 3
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("llama", asked, 16)


@pytest.mark.parametrize("arguments", [{}, TWO_WORKERS], ids=["one worker", "two workers"])
def test_kill_leaves_no_memory_behind_and_tiers_open_again(
    seam: Seam, disk: dict[str, Any], arguments: Mapping[str, Any], start_engine: StartEngine
) -> None:
    """The host tier may have hundreds of gigabytes: after a crash the kernel must release them."""
    asked = prompts("kill", 2)
    setup = setup_over(seam, disk, **arguments)
    with start_engine(setup, {**APART, **UNBOUND}) as engine:
        first = engine.call("vllm_scenarios:serve_only", prompts=asked)
        second_pass(engine, asked)
        group = processes_of(engine.pid)
        memory = memory_of(group)
        files = shared_files_of(group)
        assert memory
        assert len(group) > 1
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with -9"):
            engine.call("vllm_scenarios:serve_only", prompts=asked)
        assert not memory_of(all_processes()) & memory
        assert not [file for file in files if "tierkv" in file.name and file.exists()]
    with start_engine(setup, {**APART, **UNBOUND}) as engine:
        again = engine.call("vllm_scenarios:serve_only", prompts=asked)
    assert tokens_of(again) == tokens_of(first)
    assert sum(cached_of(again)) > 0


def mappings_of(pids: list[int]) -> Iterator[tuple[str, str]]:
    """Inode and name of everything that these processes map."""
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            _, _, _, _, inode, *name = line.split(maxsplit=5)
            yield inode, "".join(name)


def memory_of(pids: list[int]) -> set[str]:
    """Inodes of tierkv's shared memory that these processes map."""
    return {inode for inode, name in mappings_of(pids) if "memfd:tierkv-arena" in name}


def shared_files_of(pids: list[int]) -> list[Path]:
    """Files of shared memory that these processes map."""
    return [Path(name) for name in sorted({name for _, name in mappings_of(pids)}) if name.startswith("/dev/shm/")]
