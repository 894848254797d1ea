"""Definitions of all metrics: name, kind, meaning, labels and buckets. docs/reference/metrics.md is made from them."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.metrics.counters import BY_TIER

SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
"""Bytes of one transfer, the bounds of the buckets."""
CALL_BUCKETS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0)
"""Seconds of one call on the engine's thread."""
WAIT_BUCKETS = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 10.0)
"""Seconds that a request waits, or a tier takes."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of series."""

    name: str
    """Name without the ending that a kind adds: a counter is exported as ``<name>_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    meaning: str
    """Help text."""
    labels: tuple[str, ...] = ()
    """Names of its own labels, beside the constant labels of a stack."""
    buckets: tuple[float, ...] = ()
    """Upper edges of a histogram, rising."""


COUNTERS = {
    "lookups": "Answers given to the engine, deferrals among them",
    "deferrals": "Lookups deferred to the next step",
    "deadlines_expired": "Lookups ended because a tier made no progress for the deadline",
    "tokens_loaded": "Tokens loaded, by the tier whose bytes were used",
    "chunks_hit": "Chunks loaded, by the tier whose bytes were used",
    "chunks_stored": "Chunks copied from the GPU to the host tier",
    "chunks_loaded": "Chunks copied from the host tier to the GPU",
    "stores_refused": "Batches of stores that the host tier had no room for",
    "chunks_not_stored": "Chunks of requests that ended before the host tier held the chunk",
    "stores_failed": "Chunks whose copy from the GPU failed",
    "loads_failed": "Chunks whose copy to the GPU failed or was refused",
    "promotions": "Chunks read from a tier into the host tier",
    "chunks_read_ahead": "Chunks read for requests that wait in the engine's queue, before the engine asked",
    "chunks_read_in_vain": "Chunks read ahead that the request did not load",
    "cascades": "Chunks written from the host tier to a tier",
    "cascades_dropped": "Chunks not written to a tier because its queue was full or it was out of service",
    "writes_skipped": "Chunks that were not written to a tier because it has them already",
    "demotions": "Chunks written back to a tier",
    "demotions_dropped": "Dirty chunks evicted from the host tier before they were written back",
    "admissions_refused": "Chunks that a tier's eviction policy refused",
    "chunks_corrupt": "Frames that failed verification",
    "evictions": "Chunks evicted",
    "reads_failed": "Reads that failed, corruption excepted",
    "reads_absent": "Reads of chunks that a tier was expected to have and no longer had, as after the removal of its "
    "directory, or an eviction by its storage",
    "writes_failed": "Writes that failed",
    "events_dropped": "Chunks in cache events dropped because the engine did not take them",
    "events_undescribed": "Chunks in events without a payload, where payloads are configured",
    "payloads_forgotten": "Payloads of chunks dropped because the limit of stored payloads was reached",
    "tokens_not_kept": "Chunks whose tokens were not written to the file of kept tokens",
    "probes": "Existence probes sent to a tier",
    "hints_ignored": "Hints of requests that could not be used",
    "requests_dropped": "Requests that an engine continued without tierkv, because a call about them broke a rule, or "
    "because of a reset while they were running",
    "errors_contained": "Errors of tierkv that an adapter kept from the engine",
    "tokens_asked": "Tokens of requests that got their blocks, counted again after a preemption. They are the sum of "
    "the local, the loaded and the computed ones while no load is in flight",
    "tokens_local": "Tokens of these requests that the engine had in its own cache",
    "tokens_computed": "Tokens of these requests that were neither local nor loaded; those of failed loads excepted",
    "tokens_stored": "Tokens copied from the GPU to the host tier",
    "deferred_tier_ms": "Milliseconds for which lookups were deferred while a tier was asked or read for them",
    "deferred_queue_ms": "Milliseconds for which lookups were deferred while nothing was asked or read for them",
    "hits_shortened": "Hits shortened because loading the rest was expected to take longer than computing it",
    "tokens_shortened": "Tokens cut from shortened hits",
    "slowdowns": "Times that a tier came to take longer than computing what it brings, the questions to a shared one "
    "included",
    "recoveries": "Times that it came to take less again",
    "policies_failed": "Eviction policies that failed, and are no longer called",
    "observations_failed": "Policies that raised when they observed a request, and observe no more",
    "loads_streamed": "Loads in several jobs, of hits answered before they were read whole, or longer than a job",
    "loads_given_up": "Streamed loads that ended early: a chunk was lost or late, its tier became slower "
    "than computing, or the request was aborted",
    "tokens_given_up": "Tokens that were not loaded because a streamed load ended early",
    "entries_dropped": "Entries missing from the record of the stack, because the disk was too slow or failed",
}
"""Counters of scheduler and manager: field of :class:`~tierkv.metrics.counters.CoreCounters` -> meaning."""

TIER_COUNTERS = {
    "ops": "Operations whose I/O has ended",
    "keys": "Keys of those operations",
    "bytes_read": "Bytes of frames that the backend read, including reads whose deadline had passed",
    "bytes_written": "Bytes of frames that the backend wrote",
    "bytes_verified": "Bytes of frames that were read and passed verification",
    "corrupt": "Keys whose frame failed verification",
    "clear": "Keys whose frame was in the clear although its tier is encrypted; corrupt without `accept_clear`",
    "unreadable": "Keys whose frame is whole, but whose codec or key is missing here, or that holds an approximation",
    "failed": "Keys for which the backend failed",
    "no_space": "Keys that the storage had no room for",
    "timed_out": "Keys whose deadline passed",
    "refused": "Keys not attempted: queue full, tier out of service, or the stack is closing",
    "unwanted": "Keys not read, because no request waited for them any more when their turn came",
    "retries": "Repeated attempts for a key",
    "breaker_opens": "Times that the tier was taken out of service",
    "quarantined": "Damaged frames that were given to the quarantine of the backend",
}
"""Counters of dispatch: field of :class:`~tierkv.dispatch.stats.TierStats` -> meaning."""

LOOKUP_SECONDS = Metric(
    "tierkv_lookup_seconds", "histogram", "Time of one lookup call on the engine's thread", buckets=CALL_BUCKETS
)
DEFERRED_SECONDS = Metric(
    "tierkv_deferred_seconds",
    "histogram",
    "Time from a request's first deferral to its answer, or to its end",
    buckets=WAIT_BUCKETS,
)
READ_SECONDS = Metric(
    "tierkv_tier_read_seconds",
    "histogram",
    "Time of one read of a batch, from its submission on",
    labels=("tier",),
    buckets=WAIT_BUCKETS,
)
WRITE_SECONDS = Metric(
    "tierkv_tier_write_seconds",
    "histogram",
    "Time of one write of a batch, from its submission on",
    labels=("tier",),
    buckets=WAIT_BUCKETS,
)
READ_QUEUE_SECONDS = Metric(
    "tierkv_tier_read_queue_seconds",
    "histogram",
    "Part of a read before a call to the backend began; the rest is the tier's own time",
    labels=("tier",),
    buckets=WAIT_BUCKETS,
)
WRITE_QUEUE_SECONDS = Metric(
    "tierkv_tier_write_queue_seconds",
    "histogram",
    "Part of a write before a call to the backend began; the rest is the tier's own time",
    labels=("tier",),
    buckets=WAIT_BUCKETS,
)
TRANSFER_BYTES = Metric(
    "tierkv_transfer_bytes", "histogram", "Bytes of one transfer", labels=("transfer_type",), buckets=SIZE_BUCKETS
)
TRANSFER_SECONDS = Metric(
    "tierkv_transfer_seconds", "histogram", "Time of one transfer", labels=("transfer_type",), buckets=WAIT_BUCKETS
)
HISTOGRAMS = (
    *(LOOKUP_SECONDS, DEFERRED_SECONDS),
    *(READ_SECONDS, READ_QUEUE_SECONDS, WRITE_SECONDS, WRITE_QUEUE_SECONDS),
    *(TRANSFER_BYTES, TRANSFER_SECONDS),
)

READ_LATENCY = Metric("tierkv_tier_read_latency_seconds", "gauge", "Measured latency of a tier's reads", ("tier",))
READ_SPEED = Metric("tierkv_tier_read_bytes_per_second", "gauge", "Measured bandwidth of a tier's reads", ("tier",))
PREFILL_SPEED = Metric(
    "tierkv_prefill_tokens_per_second", "gauge", "The engine's prefill rate, as stated or as measured"
)
TIER_USABLE = Metric("tierkv_tier_usable", "gauge", "1 while a tier is in service, otherwise 0", ("tier",))
TIER_WRITABLE = Metric(
    "tierkv_tier_writable", "gauge", "1 while a tier is in service and its writes succeed, otherwise 0", ("tier",)
)
TIER_SLOW = Metric(
    "tierkv_tier_slow",
    "gauge",
    "1 while a tier takes longer than computing what it brings, so that its hits are shortened, otherwise 0",
    ("tier",),
)
TIER_ROOM = Metric(
    "tierkv_tier_room_bytes",
    "gauge",
    "Bytes that a tier may hold: its capacity, or less while its backend reports that it is full",
    ("tier",),
)
TIER_BREAKER = Metric(
    "tierkv_tier_breaker_state",
    "gauge",
    "0 while a tier is in service, 1 while a trial is under way, 2 while it is out of service",
    ("tier",),
)
TIER_CHUNKS = Metric("tierkv_tier_chunks", "gauge", "Chunks that a tier holds, where it has an index", ("tier",))
TIER_HELD = Metric("tierkv_tier_held_bytes", "gauge", "Bytes that a tier holds, where it has an index", ("tier",))
TIER_CAPACITY = Metric("tierkv_tier_capacity_bytes", "gauge", "Configured capacity of a tier", ("tier",))
TIER_WAITING = Metric(
    "tierkv_tier_waiting_chunks", "gauge", "Chunks of the host tier that wait to be written to a tier", ("tier",)
)
TIER_QUEUED = Metric("tierkv_tier_queued_ops", "gauge", "Operations that wait for a call to the backend", ("tier",))
TIER_QUEUE_AGE = Metric(
    "tierkv_tier_queue_age_seconds", "gauge", "Seconds for which the oldest of these operations has waited", ("tier",)
)
TIER_RUNNING = Metric("tierkv_tier_running_ops", "gauge", "Operations in a call to the backend", ("tier",))
TIER_LATE = Metric(
    "tierkv_tier_late_ops",
    "gauge",
    "Operations in a call to the backend whose deadline has passed: a call that hangs stays here",
    ("tier",),
)
WAITING_REQUESTS = Metric(
    "tierkv_waiting_requests",
    "gauge",
    "Requests with chunks in a tier that are not read yet: for want of host slots (`slots`), or because a tier of "
    "unknown speed reads for others first (`first_reads`)",
    ("reason",),
)
WAITING_AGE = Metric(
    "tierkv_waiting_requests_age_seconds", "gauge", "Seconds for which the oldest of these requests has got no chunk"
)
GAUGES = (
    *(TIER_USABLE, TIER_WRITABLE, TIER_SLOW, TIER_BREAKER),
    *(TIER_CHUNKS, TIER_HELD, TIER_ROOM, TIER_CAPACITY),
    *(TIER_WAITING, TIER_QUEUED, TIER_QUEUE_AGE, TIER_RUNNING, TIER_LATE),
    *(WAITING_REQUESTS, WAITING_AGE),
    *(READ_LATENCY, READ_SPEED, PREFILL_SPEED),
)
"""State of the tiers, requests that wait for them, and speeds that decide whether loading is worthwhile.

Each is exported once it is known.
"""


def counters() -> list[Metric]:
    """Return all counters of tierkv, under their exported names."""
    core = [
        Metric(f"tierkv_{name}", "counter", meaning, ("tier",) if name in BY_TIER else ())
        for name, meaning in COUNTERS.items()
    ]
    return core + [
        Metric(f"tierkv_tier_{name}", "counter", meaning, ("tier",)) for name, meaning in TIER_COUNTERS.items()
    ]


# -- names that dashboards of vLLM know --------------------------------------------------------------------------------

TOTAL_BYTES = Metric("vllm:kv_offload_total_bytes", "counter", "Bytes moved", ("transfer_type",))
TOTAL_TIME = Metric("vllm:kv_offload_total_time", "counter", "Seconds of all transfers", ("transfer_type",))
SIZES = Metric("vllm:kv_offload_size", "histogram", "Bytes of one transfer", ("transfer_type",), SIZE_BUCKETS)
LOAD_BYTES = Metric("vllm:kv_offload_load_bytes", "counter", "Bytes loaded to the GPU")
LOAD_TIME = Metric("vllm:kv_offload_load_time", "counter", "Seconds of all loads")
LOAD_SIZES = Metric("vllm:kv_offload_load_size", "histogram", "Bytes of one load", buckets=SIZE_BUCKETS)
STORE_BYTES = Metric("vllm:kv_offload_store_bytes", "counter", "Bytes stored from the GPU")
STORE_TIME = Metric("vllm:kv_offload_store_time", "counter", "Seconds of all stores")
STORE_SIZES = Metric("vllm:kv_offload_store_size", "histogram", "Bytes of one store", buckets=SIZE_BUCKETS)
SYNC_DELAY = Metric(
    "vllm:kv_offload_lookup_sync_delay_seconds", "histogram", LOOKUP_SECONDS.meaning, buckets=CALL_BUCKETS
)
ASYNC_DELAY = Metric(
    "vllm:kv_offload_lookup_async_delay_seconds", "histogram", DEFERRED_SECONDS.meaning, buckets=WAIT_BUCKETS
)
ALLOCATION_FAILURE = Metric("vllm:kv_offload_allocation_failure", "counter", COUNTERS["stores_refused"])
LINEAGE = (
    *(TOTAL_BYTES, TOTAL_TIME, SIZES),
    *(LOAD_BYTES, LOAD_TIME, LOAD_SIZES, STORE_BYTES, STORE_TIME, STORE_SIZES),
    *(SYNC_DELAY, ASYNC_DELAY, ALLOCATION_FAILURE),
)
