"""Benchmarks of tierkv, each figure beside its limit: ``python -m benchmarks`` lists what can be measured.

A *benchmark* is a module with a ``run(settings)`` that yields *rows*: a *figure*, its *limit* (the fastest that the
hardware or a plain loop allows), their ratio and perhaps a *target*. Both sides of a ratio take turns in the same run,
and the median over the rounds counts: absolute numbers depend more on the machine and its load than on the code.

Wings: ``core`` (calls on the engine's thread without I/O), ``tiers`` (copies, bandwidth, recovery), ``workloads``
(hits, deferrals and bytes over whole workloads), ``models`` (codecs and first tokens with real models),
``side_by_side`` (vLLM's own tiering beside tierkv). ``measure`` has the timing, ``rows`` the output.

Invariants: no benchmark asserts a time; every moved byte is verified outside of the measured time; a benchmark without
its software (vLLM, CUDA, a model) yields no rows and says so. Not part of any distribution.
"""
