"""Benchmarks of the core: calls on the engine's thread without I/O, and what a resident chunk costs in memory."""
