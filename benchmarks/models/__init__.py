"""Benchmarks on real models: codecs on their KV values, and the time to the first token in their engines."""
