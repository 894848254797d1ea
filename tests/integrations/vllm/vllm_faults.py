"""Errors of tierkv inside an engine: each entry of vLLM into tierkv raises, in an engine of its own in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vllm_scenarios import serve, serve_again
from vllm_served import Json, ServedEngine

from tierkv.integrations.vllm.connector.scheduler import ConnectorScheduler
from tierkv.integrations.vllm.connector.worker import ConnectorWorker
from tierkv.integrations.vllm.kv_events import KVEvents, OffloadingEvents
from tierkv.integrations.vllm.metrics import StatsFeed
from tierkv.integrations.vllm.spec.manager import TierKVManager
from tierkv.integrations.vllm.spec.worker import SpecWorker
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.stack.staged import StagedStack
from tierkv.worker.completion_flags import CompletionFlags, RankFlags
from tierkv.worker.host_copies import HostCopies
from tierkv.worker.worker import Worker

PLACES = {
    kind.__name__: kind
    for kind in (
        *(ConnectorScheduler, ConnectorWorker, TierKVManager, SpecWorker),
        *(KVEvents, OffloadingEvents, StatsFeed),
        *(StagedStack, StagedJobs, CompletionFlags, HostCopies, Worker, RankFlags),
    )
}


class BrokenCallError(Exception):
    """An error that nothing of tierkv raises."""


@contextmanager
def broken(entry: str) -> Any:
    """``Class.method`` raises whenever it is called; a list of the calls."""
    kind, _, name = entry.partition(".")
    original = vars(PLACES[kind])[name]
    calls: list[str] = []

    def run(self: object, *arguments: object, **keywords: object) -> None:
        calls.append(entry)
        raise BrokenCallError(f"in {entry}")

    setattr(PLACES[kind], name, property(run) if isinstance(original, property) else run)
    try:
        yield calls
    finally:
        setattr(PLACES[kind], name, original)


@contextmanager
def failed_loads(engine: ServedEngine, found: list[str]) -> Any:
    """Collect the requests whose load vLLM's scheduler receives as failed."""
    scheduler = engine.core.scheduler
    handle = scheduler._handle_failed_recving

    def note(request_ids: set[str]) -> Any:
        found.extend(request_ids)
        return handle(request_ids)

    scheduler._handle_failed_recving = note
    try:
        yield
    finally:
        scheduler._handle_failed_recving = handle


def serve_with_faults(
    served: ServedEngine,
    arguments: Json,
    entries: Sequence[str],
    prompts: Sequence[Sequence[int]],
    new: list[list[int]],
) -> Json:
    """Serve what is stored and something new while entries raise, empty all caches, and serve again.

    Returns:
        The answers before, and after; entries that were called; counters of the stack; whether every block of the
        device is free at the end; requests whose load was reported to vLLM as failed.
    """
    served.close()
    engine = ServedEngine(arguments)
    first = serve(engine, [*prompts, *new])[: len(prompts)]
    engine.forget()
    failed: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(failed_loads(engine, failed))
        calls = [stack.enter_context(broken(entry)) for entry in entries]
        known = serve_again(engine, prompts)
        reset = engine.engine.reset_prefix_cache(reset_connector=True)
        again = serve(engine, [*prompts, *new])
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        counters = engine.found(CoreCounters).as_dict()
        engine.forget()
        free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        engine.close()
    return {
        "first": first,
        "known": known,
        "again": again[: len(prompts)],
        "called": [entry for entry, made in zip(entries, calls, strict=True) if made],
        "counters": counters,
        "reset": bool(reset),
        "failed": failed,
        "free": free,
    }


def serve_with_broken_loads(served: ServedEngine, prompts: Sequence[Sequence[int]]) -> Json:
    """Serve prompts, then again while no load can start; both answers, and the loads that vLLM receives as failed."""
    first = serve(served, prompts)
    failed: list[str] = []
    with broken("SpecWorker.submit"), failed_loads(served, failed):
        known = serve_again(served, prompts)
    return {"first": first, "known": known, "failed": failed}


def serve_without_preemption_calls(served: ServedEngine, prompts: Sequence[Sequence[int]]) -> list[Json]:
    """Serve from the tiers in a vLLM that does not call ``handle_preemptions``; its base class defines it."""
    from tierkv.integrations.vllm.connector.connector import TierKVConnector  # noqa: PLC0415 - of one seam only

    start = TierKVConnector.start_load_kv
    began: list[int] = []

    def handle(self: TierKVConnector, meta: object) -> None:
        """Do nothing, as the base class."""

    def start_load(self: TierKVConnector, context: object, **keywords: object) -> None:
        TierKVConnector.handle_preemptions = original
        try:
            began.append(1)
            start(self, context, **keywords)
        finally:
            TierKVConnector.handle_preemptions = handle

    original: Callable[..., None] = TierKVConnector.handle_preemptions
    TierKVConnector.handle_preemptions, TierKVConnector.start_load_kv = handle, start_load
    try:
        serve(served, prompts)
        answers = serve_again(served, prompts)
    finally:
        TierKVConnector.handle_preemptions, TierKVConnector.start_load_kv = original, start
    assert began
    return answers
