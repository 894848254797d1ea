"""Bounds and options of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal


def store_policy(kv_transfer_params: Mapping[str, Any], default: StorePolicy) -> StorePolicy:
    """``do_remote_decode`` true asks for REQUEST_LEVEL: another engine will go on from what this one leaves."""
    return StorePolicy.REQUEST_LEVEL if kv_transfer_params.get("do_remote_decode") is True else default


FINAL_PASSES_MAX = 4
"""Store passes when a request ends, each bounded as in a step: its blocks will not come back, so this is the last
chance; and still a bounded one, because the engine waits for it. What is left is counted (``chunks_not_stored``)."""


StorePlanName = Literal["immediate", "eager", "lazy"]
"""When blocks are stored; see :mod:`tierkv.scheduler.store.plans`."""


class StorePolicy(Enum):
    """Whether a request's chunks that were loaded for it are offered for storing again (spec, sections 3 and 9)."""

    BLOCK_LEVEL = "block_level"
    """No: some tier has each of them."""
    REQUEST_LEVEL = "request_level"
    """Yes: all chunks of the request shall be in the host tier when it ends; those that still are cost nothing."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of the scheduler.

    lookup_deadline_s: a lookup is answered at the latest this long after it was first asked.
    store_chunks_per_step_max: chunks of one request offered for storing in one step, beyond those that it completes.
    prompt_only: store no chunk that holds a generated token.
    store_plan: when blocks are stored.
    store_policy: of requests that do not say it themselves.
    num_workers: workers that report each job.
    gpu_prefix_caching: the engine shares computed blocks between requests, so that a prefix that one request is just
        loading is waited for instead of being loaded twice.
    weighs_recompute: a hit is cut where loading more of it is expected to take longer than computing it.
    load_tokens_min: shorter hits are not loaded.
    prefill_tokens_per_s: how fast the engine computes prompts; None: measured.
    delays_free_blocks: the engine keeps a finished request's blocks until it is told that its stores ended.
    """

    lookup_deadline_s: float = 5.0
    store_chunks_per_step_max: int = 256
    prompt_only: bool = False
    num_workers: int = 1
    gpu_prefix_caching: bool = True
    weighs_recompute: bool = True
    load_tokens_min: int = 0
    prefill_tokens_per_s: float | None = None
    store_plan: StorePlanName = "immediate"
    store_policy: StorePolicy = StorePolicy.BLOCK_LEVEL
    delays_free_blocks: bool = False
