"""Configuration of each stack in vLLM, with equal capacity: a CPU tier of N chunks, and a folder below it."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import has_gpu
from benchmarks.side_by_side.jobs import Job, Life, StackName

_FRAME_BYTES = 4096
"""Beside a chunk's payload in a slot of tierkv: the header, rounded up to the alignment of O_DIRECT."""


def transfer_config(job: Job) -> dict[str, Any] | None:
    """VLLM's ``kv_transfer_config``; None without offloading."""
    return {
        StackName.NONE: _nothing,
        StackName.VLLM: _vllm,
        StackName.SPEC: _spec,
        StackName.CONNECTOR: _connector,
    }[job.stack](job)


def _nothing(_: Job) -> None:
    return None


def _vllm(job: Job) -> dict[str, Any]:
    own = {"spec_name": "TieringOffloadingSpec"}
    on_cpu = {"spec_name": "CpuTieringSpec", "spec_module_path": "benchmarks.side_by_side.peer"}
    extra = {
        **(own if has_gpu() else on_cpu),
        "cpu_bytes_to_use": host_chunks(job) * job.sizes.model.chunk_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": job.directory}],
        "offload_prompt_only": job.prompt_only,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _spec(job: Job) -> dict[str, Any]:
    extra = {"spec_name": "TierKVSpec", "spec_module_path": "tierkv.integrations.vllm", "tierkv": _tierkv(job)}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _connector(job: Job) -> dict[str, Any]:
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tierkv": _tierkv(job)},
    }


def _tierkv(job: Job) -> dict[str, Any]:
    """Defaults, but for paths and sizes."""
    disk = {"backend": "disk", "path": job.directory, "capacity": below_bytes(job), "min_free_bytes": 0}
    return {
        "host": {"capacity": host_chunks(job) * (job.sizes.model.chunk_bytes + _FRAME_BYTES)},
        "tiers": [disk],
    }


def below_bytes(job: Job) -> int:
    """Capacity of the folder below, for twice what a process stores at most; vLLM's has no bound."""
    sizes = job.sizes
    return max(2 << 30, 2 * sizes.burst * sizes.burst_chunks * (sizes.model.chunk_bytes + _FRAME_BYTES))


def host_chunks(job: Job) -> int:
    """Capacity of the CPU tier in this life."""
    return job.sizes.long_host_chunks if job.life is Life.LONG else job.sizes.host_chunks
