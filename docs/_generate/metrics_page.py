"""The body of docs/reference/metrics.md: every metric by name, with how to get at them."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.metrics.definitions import GAUGES, HISTOGRAMS, LINEAGE, Metric, counters

LEAD = """\
A stack counts and measures; it opens no port by itself. Inside vLLM nothing is to be done: its `/metrics` has all
series of this page. A program without a server of its own serves them in one call; `TieredPrefixCache` has the same
method:

```python
import tierkv
from tierkv import EngineSpec, GroupSpec

engine = EngineSpec(
    model="my-model", dtype="float32", groups=(GroupSpec(block_tokens=16, page_bytes=(4096,)),), hash_block_tokens=16
)
with tierkv.open_stack({"host": {"capacity": "1MiB"}}, engine) as stack, tierkv.serve_metrics(stack, port=0) as server:
    print(server.url)
```

A program that exports metrics already registers the collector of the stack:

```python
from prometheus_client import CollectorRegistry, generate_latest

from tierkv.metrics.prometheus import StackCollector

registry = CollectorRegistry()
with tierkv.open_stack({"host": {"capacity": "1MiB"}}, engine) as stack:
    registry.register(StackCollector(stack, {"engine": "0"}))
    text = generate_latest(registry).decode()
assert 'tierkv_lookups_total{engine="0"} 0.0' in text
```

The first label of each sample is the constant label that you pass (`engine` above). `tier` is the configured name of a
tier, or `host`. Counters are exported with the ending `_total`; of a histogram `x` there are `x_bucket`, `x_sum` and
`x_count`, and an observation that equals an edge counts below it.

A hit rate is a share of the tokens that were asked for. While no load is in flight, `tokens_asked` is the sum of
`tokens_local`, `tokens_loaded` over all tiers, and `tokens_computed`. An engine that schedules itself, such as vLLM
with the spec, reports neither the asked, the local nor the computed tokens: these stay 0, and there is no hit rate.

```text
sum by (tier) (rate(tierkv_tokens_loaded_total[5m])) / on () group_left sum(rate(tierkv_tokens_asked_total[5m]))
```
"""

GAUGES_LEAD = "Each is exported once it is known. A shared tier has no index, so its chunks and bytes are unknown."

LINEAGE_LEAD = """\
## Under the names of vLLM

For existing dashboards: feed `LineageMetrics` with the result of `stack.metrics.take_samples()`, as an object or as the
dict that another process sent, for one or several engines.

```python
from tierkv.metrics.lineage import LineageMetrics
from tierkv.metrics.stack_stats import ConnectorStats
from tierkv.metrics.transfer_stats import LOAD, TransferStats

exported = CollectorRegistry()
metrics = LineageMetrics(exported, ["model_name", "engine"], {0: ("my-model", "0"), 1: ("my-model", "1")})
loads = TransferStats()
loads.record(LOAD, 2_000_000, 0.004)  # as a worker does
metrics.observe(ConnectorStats(loads).as_dict(), engine=1)
assert "vllm:kv_offload_load_bytes_total" in generate_latest(exported).decode()
```

`transfer_type` is `CPU_to_GPU` for loads and `GPU_to_CPU` for stores.

Inside vLLM none of this is to be done: its `/metrics` has all series of this page, with its labels `model_name` and
`engine` before ours, and without those that have a `transfer_type` in this last part.
"""


def _table(metrics: Iterable[Metric]) -> str:
    rows = [
        f"| `{metric.name}{'_total' if metric.kind == 'counter' else ''}` | {_labels(metric)} | {metric.meaning} |"
        for metric in metrics
    ]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows])


def _histograms(metrics: Iterable[Metric]) -> str:
    rows = []
    for metric in metrics:
        edges = " ".join(f"{edge:g}" for edge in metric.buckets)
        rows.append(f"| `{metric.name}` | {_labels(metric)} | {metric.meaning} | {edges} |")
    return "\n".join(["| metric | labels | meaning | edges |", "|---|---|---|---|", *rows])


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


def body() -> str:
    """The page without its title."""
    return "\n".join(
        [
            LEAD,
            f"## Counters\n\n{_table(counters())}\n",
            f"## Histograms\n\nSeconds, or bytes where the name says so.\n\n{_histograms(HISTOGRAMS)}\n",
            f"## Gauges\n\n{GAUGES_LEAD}\n\n{_table(GAUGES)}\n",
            LINEAGE_LEAD,
            f"{_table(metric for metric in LINEAGE if metric.kind == 'counter')}\n",
            f"{_histograms(metric for metric in LINEAGE if metric.kind == 'histogram')}\n",
        ]
    )
