"""From one process to the next: the only way to show that nothing of a prefix was left in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import GREEDY, greedy, make_prompt

from tierkv.errors import ConfigError

SUPPORT = Path(__file__).resolve().parents[2] / "support"

PROGRAM = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
kind, stack, what = sys.argv[2:5]
import torch
from hf_models import GREEDY, make_model, make_prompt
from tierkv.integrations.transformers import TieredPrefixCache
cache = TieredPrefixCache(make_model(kind), stack, block_tokens=16, piece_tokens=64)
document = make_prompt(150)
if what == "ask":
    out = cache.generate([document + make_prompt(12, seed=1)], **GREEDY)
    print(json.dumps([cache.last_prompts[0].by_tier, out.tolist()]))
    cache.close()
elif what == "answer":
    cache.generate([document], **GREEDY)  # and never a close
else:
    cache.prefill(document)
    if what == "kill":
        print("stored", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program above in a process of its own."""
    command = [sys.executable, "-I", "-c", PROGRAM, str(SUPPORT), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_another_process_finds_the_document(kind: str, tmp_path: Path, model: Callable[..., Any]) -> None:
    """After `prefill` returns, its chunks are on the disk, even if the process dies."""
    first = run(kind, str(tmp_path / "kv"), "kill")
    assert first.returncode == -signal.SIGKILL, first.stderr
    finds(kind, str(tmp_path / "kv"), model)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_who_forgets_to_close_loses_nothing(kind: str, tmp_path: Path, model: Callable[..., Any]) -> None:
    """A script ends without a word, and its cache is closed with the interpreter. The disk of this stack gets a chunk
    when memory has no room for it, or at the close: without one it would be empty."""
    path = tmp_path / "stack.toml"
    disk = f'backend = "disk"\npath = "{tmp_path}/kv"\ncapacity = "64MiB"\nmin_free_bytes = 0\nwrite = "back"\n'
    path.write_text(f'[host]\ncapacity = "8MiB"\n[[tiers]]\n{disk}')
    first = run(kind, str(path), "answer")
    assert first.returncode == 0, first.stderr
    finds(kind, str(path), model)


def finds(kind: str, stack: str, model: Callable[..., Any]) -> None:
    """A new process has the document from the disk, and answers as the model alone does."""
    second = run(kind, stack, "ask")
    assert second.returncode == 0, second.stderr
    by_tier, tokens = json.loads(second.stdout)
    assert by_tier == {"disk": 144}
    ids = torch.tensor([make_prompt(150) + make_prompt(12, seed=1)])
    assert tokens == greedy(model(kind), ids).tolist()


def test_a_stack_may_be_a_file(tmp_path: Path, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """The description is the one of `tierkv check`, and its mistakes are reported in the same way."""
    path = tmp_path / "stack.toml"
    path.write_text(f'[host]\ncapacity = "1MiB"\n[[tiers]]\nbackend = "fsspec"\nurl = "file://{tmp_path}/kv"\n')
    for loaded in (0, 96):
        with open_cache(model("llama"), path) as cache:
            cache.generate(make_prompt(100), **GREEDY)
            assert cache.last_prompts[0].loaded_tokens == loaded
    path.write_text('[host]\ncapacity = "1MiB"\npolicy = "lur"\n')
    with pytest.raises(ConfigError, match="lru"):
        open_cache(model("llama"), str(path))
    with pytest.raises(ConfigError, match="no such file"):
        open_cache(model("llama"), tmp_path / "nothing.yaml")


def test_a_stack_for_prompts_only(
    model: Callable[..., Any], open_cache: Callable[..., Any], stack: dict[str, Any]
) -> None:
    """`store.prompt_only` has its usual meaning: generated tokens are not stored."""
    cache = open_cache(model("gemma3"), {**stack, "store": {"prompt_only": True}})
    answered = cache.generate(make_prompt(100), **GREEDY)
    assert cache.load(answered).tokens == 96


def test_what_a_call_did_is_told(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Users decide by these figures whether it pays."""
    served = model("gemma3")
    with open_cache(served) as cache:
        report = cache.prefill(make_prompt(200)).prompts[0]
        assert (report.prompt_tokens, report.loaded_tokens, report.computed_tokens) == (200, 0, 200)
        assert report.offered_tokens == 192
        assert report.compute_s > 0
        assert report.store_s > 0
        # Chunks of both groups, and the disk has them when the call returns.
        assert (
            cache.stack.metrics.counters.cascades["disk"] == cache.stack.metrics.counters.chunks_stored == 2 * 192 // 16
        )
    cache = open_cache(served)
    cache.load(make_prompt(80))
    hit = cache.load(make_prompt(200))
    (report,) = cache.last_prompts
    assert hit.prompts == (report,)
    assert report.by_tier["disk"] + report.by_tier["host"] == report.loaded_tokens == 192
    assert report.by_tier["host"] == 80
    assert report.load_s > 0
    assert report.computed_tokens == 0
    cache.generate(make_prompt(200), store_answer=False, **GREEDY)
    assert cache.last_prompts[0].computed_tokens == 7
    assert cache.last_prompts[0].offered_tokens == 0
    assert cache.flush()
