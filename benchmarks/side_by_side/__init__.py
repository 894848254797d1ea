"""Benchmarks side by side with vLLM: one workload through vLLM's own tiering and through tierkv, engine by engine."""
