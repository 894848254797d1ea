"""Benchmarks of tiers: copies, bandwidth and recovery, each beside the limit of the hardware or of a plain client."""
