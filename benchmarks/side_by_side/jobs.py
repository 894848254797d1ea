"""Job of one engine process, as plain data in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.side_by_side.prompts import Shape

BLOCK_TOKENS = 32
"""Tokens of vLLM's blocks and of all chunks: the smallest that vLLM's CPU attention supports."""


class StackName(Enum):
    """Store of the KV cache beyond the engine's own."""

    NONE = "no offloading"
    VLLM = "vLLM's tiering"
    SPEC = "TierKVSpec"
    CONNECTOR = "TierKVConnector"


class Life(Enum):
    """Part of the story that a process runs.

    FIRST: empty tiers; everything once, then once more with the engine's own cache emptied. RESTART: the next process
    on the same disk. LONG: prefixes longer than the CPU tier, with a disk of its own. STORED: many prompts are served
    and stored. BURST: the next process on that disk gets all of them at once. DISK: the next process on that disk, with
    an empty page cache, gets some of them one by one, and the others at once. PASSES: the workload twice; the engine's
    own cache is emptied in between.
    """

    FIRST = "first"
    RESTART = "restart"
    LONG = "long"
    STORED = "stored"
    BURST = "burst"
    DISK = "disk"
    PASSES = "passes"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Llama with random weights: little arithmetic for much KV, so that loading beats computing on a CPU."""

    layers: int
    hidden: int
    heads: int
    head_dim: int = 64
    vocabulary: int = 1000

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token: key and value of every layer and head, bfloat16."""
        return 2 * 2 * self.layers * self.heads * self.head_dim

    @property
    def chunk_bytes(self) -> int:
        """KV bytes of one block."""
        return BLOCK_TOKENS * self.token_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of an engine and its tiers, in chunks of one block.

    device_chunks: what the engine's own cache holds. host_chunks: the CPU tier. long_chunks, long_host_chunks: a prefix
    that is longer than the CPU tier, and that tier; there is a second one, longer by one chunk. alone, alone_chunks:
    prompts that are served one by one. batch_tokens: most tokens in a step. give_up_s: when a request that does not end
    is taken back. burst, burst_chunks: prompts that come at once.
    """

    model: ModelShape
    shape: Shape
    device_chunks: int
    host_chunks: int
    long_host_chunks: int
    long_chunks: int
    alone: int
    alone_chunks: int
    concurrency: int
    batch_tokens: int
    give_up_s: float
    burst: int
    burst_chunks: int

    @property
    def context_tokens(self) -> int:
        """Longest prompt with its answer; it is the long prefix."""
        return (self.long_chunks + 2) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """One engine process. directory: of the lower tier, kept from the first life to the next. seed: of all prompts.

    prompt_only: vLLM's tiering stores no generated tokens, which is its default.
    """

    stack: StackName
    life: Life
    sizes: Sizes
    model_path: str
    directory: str
    seed: int
    counts_lookups: bool
    prompt_only: bool = True

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Job:
        """Make a job from the result of ``dataclasses.asdict`` and ``json`` (enums by value)."""
        sizes = dict(data["sizes"])
        sizes["model"], sizes["shape"] = ModelShape(**sizes["model"]), Shape.of_json(sizes["shape"])
        rest = {name: data[name] for name in ("model_path", "directory", "seed", "counts_lookups", "prompt_only")}
        return cls(StackName(data["stack"]), Life(data["life"]), Sizes(**sizes), **rest)
