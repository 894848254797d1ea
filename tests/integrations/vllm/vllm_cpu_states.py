"""Kernel that vLLM's build for CPUs lacks: it keeps states of Mamba 2 inside a step, as the kernels for GPUs do.

A step on a GPU may compute several blocks of a prompt, and stores the state behind the last whole block in a block of
its own. The kernel for CPUs only returns the last state, and the code that would store the other is written in Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssd_combined

_scan = ssd_combined._mamba_chunk_scan_combined_fwd


def complete() -> None:
    """Put in what is missing."""
    ssd_combined._mamba_chunk_scan_combined_fwd = _scan_with_states
    mamba_mixer2.store_prefill_checkpoint = _store_checkpoint


def _scan_with_states(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    out: torch.Tensor,
    *,
    initial_states: torch.Tensor | None = None,
    return_intermediate_states: bool = False,
    seq_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """The scan; with the state behind each chunk, if these are asked for: chunk by chunk then."""
    if not return_intermediate_states:
        states: torch.Tensor = _scan(
            x, dt, a, b, c, chunk_size, out, initial_states=initial_states, cu_seqlens=cu_seqlens, **more
        )
        return states
    ends, sequences = cu_chunk_seqlens.tolist(), seq_idx.tolist()
    found: list[torch.Tensor] = []
    for chunk, sequence in enumerate(sequences):
        goes_on = chunk > 0 and sequences[chunk - 1] == sequence
        before = None if initial_states is None else initial_states[sequence : sequence + 1]
        part = slice(ends[chunk], ends[chunk + 1])
        found.append(
            _scan(
                x[part],
                dt[part],
                a,
                b[part],
                c[part],
                chunk_size,
                out[part],
                initial_states=found[-1] if goes_on else before,
                cu_seqlens=cu_seqlens.new_tensor([0, part.stop - part.start]),
                **more,
            )
        )
    return torch.cat(found)


def _store_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Put the states that lie inside the step into their blocks; rows without one have an offset of 0."""
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset > 0:
            block, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[int(chunk_idx[row])]
