"""Every entry of vLLM into tierkv raises once in a real engine: tokens stay right, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

HERE = "vllm_faults"
STACK = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}

DROPS = {
    "connector": [
        *("ConnectorScheduler.on_new_request", "ConnectorScheduler.get_num_new_matched_tokens"),
        *("ConnectorScheduler.request_finished", "StatsFeed.connector_stats", "KVEvents.translate"),
    ],
    "spec": [
        *("TierKVManager.on_new_request", "TierKVManager.lookup"),
        *("StatsFeed.offloading_stats", "OffloadingEvents.translate"),
    ],
}
"""Entries about one request, and those that only observe: all of them at once."""

STOPS = {
    "connector": [
        *("ConnectorScheduler.update_state_after_alloc", "ConnectorScheduler.build"),
        *("ConnectorScheduler.process_output", "ConnectorScheduler.has_pending_work"),
        *("ConnectorScheduler.reset_cache", "ConnectorScheduler.loaded_by_tier"),
        *("ConnectorWorker.start_step", "ConnectorWorker.queue_stores", "ConnectorWorker.take_results"),
        *("ConnectorWorker.shutdown", "ConnectorScheduler.shutdown"),
    ],
    "spec": [
        *("TierKVManager.on_schedule_end", "TierKVManager.prepare_store", "TierKVManager.complete_store"),
        *("TierKVManager.complete_load", "TierKVManager.has_pending_work"),
        *("TierKVManager.on_request_finished", "TierKVManager.reset_cache", "TierKVManager.get_load_source"),
        *("TierKVManager.prepare_load", "SpecWorker.submit", "SpecWorker.get_finished"),
        *("TierKVManager.shutdown", "SpecWorker.shutdown"),
    ],
}
"""Entries after which tierkv may have to stop: one at a time."""

CASES: list[tuple[str, list[str]]] = [(seam, [entry]) for seam, entries in STOPS.items() for entry in entries]
CASES += DROPS.items()

INSIDE = [
    *("StagedStack.prepare_load", "StagedJobs.begin_load", "CompletionFlags.allocate"),
    *("HostCopies.start", "HostCopies._load", "Worker._count", "RankFlags.set_ended"),
]
"""Calls inside of tierkv on the way of a load of the spec, below the entries."""

CASES += [("spec", [entry]) for entry in INSIDE]

LOSES_LOADS = {
    *("TierKVManager.prepare_load", "SpecWorker.submit", "SpecWorker.get_finished"),
    *("StagedStack.prepare_load", "StagedJobs.begin_load", "HostCopies.start", "HostCopies._load", "Worker._count"),
}
"""Calls without which a load of the spec does not succeed."""


@pytest.fixture(scope="module")
def process(models: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """A process for one engine after the other; errors are raised in tests otherwise."""
    with start_engine(EngineSetup("connector", STACK), {"TIERKV_VALIDATE": "0"}) as process:
        yield process


@pytest.mark.parametrize(("seam", "entries"), CASES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_an_entry_that_raises_costs_only_hits(
    process: EngineProcess, models: Path, seam: Seam, entries: list[str]
) -> None:
    """The request computes what it cannot load, a reset reports success only if nothing old is found, and the log has
    one line for each kind of error."""
    arguments = EngineSetup(seam, STACK, arguments=EVENTS).engine_arguments(models)
    asked, new = prompts("contained", 2), prompts(f"new {entries[0]}", 1)
    logged = process.log.read_text(encoding="utf-8").count("BrokenCallError")
    told = process.call(f"{HERE}:serve_with_faults", arguments=arguments, entries=entries, prompts=asked, new=new)
    assert tokens_of(told["known"]) == tokens_of(told["again"]) == tokens_of(told["first"])
    assert all(answer["finished"] for answer in told["known"] + told["again"])
    assert told["free"]
    if not entries[0].endswith("shutdown"):  # called after the last answer
        assert told["called"] == entries
        assert told["counters"]["errors_contained"] >= 1
    if entries == DROPS[seam]:
        assert told["counters"]["requests_dropped"] >= 1
    if entries[0].endswith("reset_cache"):
        assert told["reset"]
        assert cached_of(told["again"]) == [0, 0], "a reset that failed must still empty the cache"
    assert process.log.read_text(encoding="utf-8").count("BrokenCallError") > logged
    if entries[0] in LOSES_LOADS:
        assert told["failed"], "a load that cannot be made must fail, not be left out"


def test_loads_start_with_the_forward_pass_where_no_earlier_call_comes(start_engine: StartEngine) -> None:
    """Another vLLM may leave ``handle_preemptions`` out where nothing was preempted."""
    asked = prompts("late start", 3)
    with start_engine(EngineSetup("connector", STACK)) as engine:
        second = engine.call(f"{HERE}:serve_without_preemption_calls", prompts=asked)
        third = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(second) == cached_of(third) == [192] * 3
    assert tokens_of(second) == tokens_of(third)
