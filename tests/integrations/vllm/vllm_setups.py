"""Settings of tierkv in vLLM, for both adapters, and the small engines of the tests."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tierkv.frames.frame import MAGIC

Seam = Literal["connector", "spec"]
SEAMS: tuple[Seam, ...] = ("connector", "spec")

MODULE = "tierkv.integrations.vllm"
BLOCK_TOKENS = 32
"""The smallest that vLLM takes on a CPU."""

DRAFT_TOKENS = 3
"""Proposed per step, where an engine speculates."""

OBJECTS_WAIT_S = 60.0

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",  # no ties between tokens: a batch of another shape must choose the same
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": 24,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine to serve with.

    seam: how tierkv is plugged in. model: name of one of the small models. stack: description of the stack, without
    its chunks. blocks_per_chunk: blocks of the device per chunk. arguments: of vLLM, beside and over :data:`ARGUMENTS`.
    options: of the adapter, beside the stack; tests empty the host tier alone with a reset.
    draft: method of speculation, and name of a small model for it.
    """

    seam: Seam
    stack: Mapping[str, Any]
    model: str = "llama"
    blocks_per_chunk: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=lambda: {"tierkv_reset_scope": "host"})
    draft: tuple[str, str] | None = None

    def engine_arguments(self, models: Path) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        speculative = {} if self.draft is None else {"speculative_config": self.speculative_config(models)}
        return {
            **ARGUMENTS,
            "model": str(models / self.model),
            "kv_transfer_config": self.kv_transfer_config(),
            **speculative,
            **self.arguments,
        }

    def speculative_config(self, models: Path) -> dict[str, Any]:
        """Value of ``--speculative-config``."""
        method, draft = self.draft or ("", "")
        return {"method": method, "model": str(models / draft), "num_speculative_tokens": DRAFT_TOKENS}

    def kv_transfer_config(self) -> dict[str, Any]:
        """Value of ``--kv-transfer-config``."""
        stack = {**self.stack, "chunk": {**self.stack.get("chunk", {}), "blocks": self.blocks_per_chunk}}
        if self.seam == "connector":
            return {
                "kv_connector": "TierKVConnector",
                "kv_connector_module_path": MODULE,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"tierkv": stack, **self.options},
            }
        extra = {"spec_name": "TierKVSpec", "spec_module_path": MODULE, "tierkv": stack, **self.options}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def prompts(seed: str, count: int, tokens: int = 200) -> list[list[int]]:
    """Prompts that no other seed gives: token ids, the three special ones left out."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(tokens)] for _ in range(count)]


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    """The generated tokens of each answer."""
    return [answer["tokens"] for answer in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    """Number of tokens found for each prompt."""
    return [answer["cached"] for answer in answers]


def objects_in(folder: Path) -> int:
    """Number of complete chunks in the folder of an object tier."""
    return sum(1 for _ in folder.glob("*/??/" + "[0-9a-f]" * 32))


def objects_after(folder: Path, count: int) -> int:
    """Number of chunks, returned as soon as it is ``count``, or after a timeout."""
    give_up_s = time.monotonic() + OBJECTS_WAIT_S
    while objects_in(folder) < count and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return objects_in(folder)


def flip_bytes(place: Path) -> int:
    """Flip a byte in the middle of every page of every file of data, but for the pages of headers; how many."""
    flipped = 0
    for file in sorted(path for path in place.rglob("*") if path.is_file() and path.suffix in {".dat", ""}):
        data = bytearray(file.read_bytes())
        for page in range(0, len(data) // 4096 * 4096, 4096):
            if not data.startswith(MAGIC, page):  # the checksum alone must tell
                data[page + 2048] ^= 0xFF
                flipped += 1
        with file.open("r+b") as raw:
            raw.write(data)
            raw.flush()
            os.fsync(raw.fileno())
    return flipped
