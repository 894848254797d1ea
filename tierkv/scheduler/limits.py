"""Bounds and options of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal


def store_policy(kv_transfer_params: Mapping[str, Any], default: StorePolicy) -> StorePolicy:
    """Store policy of a request: its own, or the default.

    ``do_remote_decode`` true asks for REQUEST_LEVEL: another engine continues from the stored chunks.
    """
    return StorePolicy.REQUEST_LEVEL if kv_transfer_params.get("do_remote_decode") is True else default


FINAL_PASSES_MAX = 4
"""Store passes when a request ends.

Each pass is bounded like a step. This is the last opportunity, because the blocks are reused; the number is bounded
because the engine waits. Chunks that remain are counted (``chunks_not_stored``).
"""


StorePlanName = Literal["immediate", "eager", "lazy"]
"""Store plan: the step in which blocks are stored (:mod:`tierkv.scheduler.store.plans`)."""


class StorePolicy(Enum):
    """Whether chunks that were loaded for a request are offered for storing again."""

    BLOCK_LEVEL = "block_level"
    """No: a tier has each of them."""
    REQUEST_LEVEL = "request_level"
    """Yes: all chunks of the request must be in the host tier when it ends; present ones cost nothing."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds and options of the scheduler."""

    lookup_deadline_s: float = 5.0
    """Seconds without progress of a tier after which a lookup that waits for it is answered."""
    store_chunks_per_step_max: int = 256
    """Chunks of one request offered for storing in one step, beyond those that the step completes."""
    job_bytes_max: int = 8 << 20
    """Bytes that one store job copies at most, if they are more than one chunk: some milliseconds. Lower tiers get them
    while the rest of a request is copied. An engine without requests waits for the copies of as many in one step."""
    prompt_only: bool = False
    """Store no chunk with a generated token."""
    reads_ahead: bool = True
    """Read chunks of requests that the engine has not asked about yet."""
    num_workers: int = 1
    """Number of workers that report each job."""
    gpu_prefix_caching: bool = True
    """The engine shares computed blocks: a request waits for a prefix that another one is loading."""
    weighs_recompute: bool = True
    """Shorten hits where loading is expected to take longer than computing."""
    load_tokens_min: int = 0
    """Shorter hits are not loaded."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that the engine computes per second; None: measured."""
    store_plan: StorePlanName = "immediate"
    """Store plan."""
    store_policy: StorePolicy = StorePolicy.BLOCK_LEVEL
    """Store policy of requests that do not name one."""
    delays_free_blocks: bool = False
    """The engine keeps a finished request's blocks until its stores are reported as ended."""
