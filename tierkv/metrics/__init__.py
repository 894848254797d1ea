"""Counters and histograms of a stack, and their export.

Four kinds of numbers exist. ``CoreCounters`` counts what scheduler and manager did; dispatch counts per tier.
``StackStats`` measures delays of lookups and transfers of workers, as histograms and as samples. Gauges are measured
speeds; a gauge appears when its value is known. ``definitions`` holds the name, meaning and buckets of each metric, and
the reference page is made from it.

Three exporters read them. ``prometheus.StackCollector`` reads a stack in the same process when it is scraped;
``serving.serve_metrics`` serves it over HTTP.
``deltas.Deltas`` makes increments for an exporter in another process. ``lineage.LineageMetrics`` exports samples under
the names that dashboards of vLLM use.

Numbers are written on the engine's thread, and may be read on any thread. Counters only grow. Memory is bounded:
histograms have fixed buckets, and samples that no exporter takes are dropped, the oldest first.

``prometheus``, ``serving`` and ``lineage`` need ``prometheus_client``; the rest needs the standard library only.
"""
