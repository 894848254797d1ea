"""Kernels that vLLM's build for CPUs lacks: those that keep states of Mamba 2 inside a step, and those of Mamba 1.

A step on a GPU may compute several blocks of a prompt, and stores the state behind the last whole block in a block of
its own. The kernel for CPUs only returns the last state, and the code that would store the other is written in Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssd_combined

_scan = ssd_combined._mamba_chunk_scan_combined_fwd
_project = RowParallelLinear.forward


def complete() -> None:
    """Put in what is missing."""
    ssd_combined._mamba_chunk_scan_combined_fwd = _scan_with_states
    mamba_mixer2.store_prefill_checkpoint = _store_checkpoint
    mamba_mixer.selective_scan_fn = _scan_tokens
    mamba_mixer.selective_state_update = _add_token
    RowParallelLinear.forward = _project_rows


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


def _scan_tokens(
    u: torch.Tensor,
    states: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    *,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Mamba 1 over prompts, token by token; columns are tokens, those of one prompt behind each other."""
    step = softplus(dt + bias[:, None])
    ends, out = query_start_loc.tolist(), torch.empty_like(u)
    for row, block in enumerate(cache_indices.tolist()):
        state = states[block] * bool(has_initial_state[row])
        for token in range(ends[row], ends[row + 1]):
            width = step[:, token, None]
            state = torch.exp(width * a) * state + width * u[:, token, None] * b[:, token]
            out[:, token] = state @ c[:, token]
        states[block] = state
    return (out + d[:, None] * u) * silu(gate)


def _add_token(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    *,
    z: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **more: Any,
) -> None:
    """Mamba 1 over the next token of each request; rows are requests."""
    step = softplus(dt + bias)
    for row, block in enumerate(state_batch_indices.flatten().tolist()):
        if block:  # the null block: a row without a request
            width = step[row, :, None]
            states[block] = torch.exp(width * a) * states[block] + width * x[row, :, None] * b[row]
            out[row] = (states[block] @ c[row] + d * x[row]) * silu(z[row])


def _project_rows(layer: RowParallelLinear, rows: torch.Tensor, *args: Any, **more: Any) -> Any:
    """The output of a layer. vLLM's matrices on CPUs need rows of neighbours, and Mamba 1 gives it columns."""
    return _project(layer, rows.contiguous(), *args, **more)
