"""What one engine process is asked to do, as plain data that goes through a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.side_by_side.prompts import Shape

BLOCK_TOKENS = 32
"""Of vLLM's blocks, and of everybody's chunks: the least that vLLM's CPU attention takes."""


class StackName(Enum):
    """Who keeps the KV cache that does not fit the engine's own."""

    NONE = "no offloading"
    VLLM = "vLLM's tiering"
    SPEC = "TierKVSpec"
    CONNECTOR = "TierKVConnector"


class Life(Enum):
    """Which part of the story a process plays.

    FIRST: empty tiers; everything once, then once more with the engine's own cache emptied. RESTART: the next process
    on the same disk. LONG: prefixes longer than the CPU tier, with a disk of its own.
    """

    FIRST = "first"
    RESTART = "restart"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama with random weights. Little arithmetic for much KV, so that loading has something to win on a CPU."""

    layers: int
    hidden: int
    heads: int
    head_dim: int = 64
    vocabulary: int = 1000

    @property
    def token_bytes(self) -> int:
        """KV of one token: key and value of every layer and head, bfloat16."""
        return 2 * 2 * self.layers * self.heads * self.head_dim

    @property
    def chunk_bytes(self) -> int:
        """KV of one block."""
        return BLOCK_TOKENS * self.token_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of an engine and its tiers, in chunks of one block.

    device_chunks: what the engine's own cache holds. host_chunks: the CPU tier. long_chunks, long_host_chunks: a prefix
    that is longer than the CPU tier, and that tier; there is a second one, longer by one chunk. alone, alone_chunks:
    prompts that are served one by one. batch_tokens: most tokens in a step. give_up_s: when a request that does not end
    is taken back.
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

    @property
    def context_tokens(self) -> int:
        """The longest prompt with its answer; the long prefix is it."""
        return (self.long_chunks + 2) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Job:
    """One engine process. directory: of the lower tier, kept from the first life to the next. seed: of all prompts."""

    stack: StackName
    life: Life
    sizes: Sizes
    model_path: str
    directory: str
    seed: int
    counts_lookups: bool

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Job:
        """From what ``dataclasses.asdict`` and ``json`` make of one (enums by value)."""
        sizes = dict(data["sizes"])
        sizes["model"], sizes["shape"] = ModelShape(**sizes["model"]), Shape.of_json(sizes["shape"])
        rest = {name: data[name] for name in ("model_path", "directory", "seed", "counts_lookups")}
        return cls(StackName(data["stack"]), Life(data["life"]), Sizes(**sizes), **rest)
