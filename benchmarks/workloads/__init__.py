"""Benchmarks of whole workloads: hits, writes, deferrals and bytes read, over made workloads and traces."""
