"""Work of one process of the demo: an engine, with or without a stack, serves turns of the conversations.

Each phase runs in its own process, so that only the lower tiers can pass bytes from one phase to the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tierkv.cli.demo.phases import Phase, PhaseResult, Progress, Served
from tierkv.cli.demo.ranks import RankProcess, rank_processes
from tierkv.cli.demo.workload import Conversation
from tierkv.reference.engine import Engine
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack


def run_phase(phase: Phase, progress: Progress) -> PhaseResult:
    """Serve a phase, from an empty engine and host tier until all chunks are written."""
    torch.set_num_threads(1)  # more threads are slow on a busy machine, and the demo's matrices are small
    result = PhaseResult(phase.name, os.getpid())
    with _opened(phase) as (stack, engine, ranks):
        result.worker_pids = [rank.pid for rank in ranks]
        for turn in phase.turns:
            waves = [[c] for c in phase.conversations] if phase.one_by_one else [phase.conversations]
            for wave in waves:
                _serve(engine, stack, phase, turn, wave, result)
                progress(len(result.served))
        if stack is not None:
            _close(engine, stack, ranks, result)
    result.conversations = phase.conversations
    return result


@contextmanager
def _opened(phase: Phase) -> Iterator[tuple[Stack | None, Engine, list[RankProcess]]]:
    """Open a stack, an engine over it, and the processes of its ranks, if any."""
    config = phase.engine
    if phase.stack is None:
        yield None, Engine(config), []
        return
    with open_stack(phase.stack, config.engine_spec(), verify_frames=phase.verify_frames) as stack:
        if not config.worker_processes:
            yield stack, Engine(config, connector=stack), []
            return
        with rank_processes(stack, config.tensor_parallel) as (ranks, allocate):
            yield stack, Engine(config, connector=stack, workers=ranks, allocate=allocate), ranks


def _serve(  # noqa: PLR0913, PLR0917 - one step of one caller
    engine: Engine, stack: Stack | None, phase: Phase, turn: int, wave: list[Conversation], result: PhaseResult
) -> None:
    before = {} if stack is None else dict(stack.metrics.counters.tokens_loaded)
    ids = {f"{c.name}/{turn}": c for c in wave}
    for request_id, conversation in ids.items():
        engine.add_request(conversation.prompt(turn), phase.answer_tokens, request_id=request_id)
    while engine.has_unfinished:
        result.note(engine.step().events)
    after = {} if stack is None else dict(stack.metrics.counters.tokens_loaded)
    by_tier = {tier: count - before.get(tier, 0) for tier, count in after.items() if count > before.get(tier, 0)}
    for request_id, conversation in ids.items():
        record = engine.record(request_id)
        conversation.add_answer(turn, list(record.output_tokens))
        result.served.append(
            Served(
                conversation=conversation.name,
                turn=turn,
                prompt_tokens=record.num_prompt_tokens,
                answer=list(record.output_tokens),
                ttft_s=record.ttft_s or 0.0,
                tokens_computed=record.tokens_computed,
                tokens_loaded=record.tokens_loaded,
                tokens_cached=record.tokens_cached,
                deferrals=record.deferrals,
                loaded_by_tier=by_tier if len(wave) == 1 else {},
            )
        )


def _close(engine: Engine, stack: Stack, ranks: list[RankProcess], result: PhaseResult) -> None:
    """Flush all stored chunks to the tiers, then collect the counters."""
    while stack.has_pending_work():
        result.note(engine.step().events)
    result.flushed = stack.flush()
    result.note(stack.events.take())
    result.counters = stack.metrics.counters.as_dict()
    result.tiers = stack.tiers.stats()
    copied = [rank.copied_bytes() for rank in ranks] or [(stack.worker.bytes_stored, stack.worker.bytes_loaded)]
    result.bytes_stored, result.bytes_loaded = map(sum, zip(*copied, strict=True))
