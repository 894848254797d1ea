"""Benchmarks of an engine under stress: overload, long prompts, many waiting requests, a burst after a restart."""
