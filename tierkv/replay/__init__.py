"""Replay of request traces against eviction policies and whole stacks, without KV data.

A *trace* (:mod:`~tierkv.replay.trace`) lists requests with their times and chunk ids. :mod:`~tierkv.replay.replaying`
plays them against one policy with a given capacity, as the host tier would drive it, and counts hits and writes.
:mod:`~tierkv.replay.bounds` provides two references: Belady's choice, which knows the future, and first in, first out.
:mod:`~tierkv.replay.stack_player` plays them through a whole stack: the real scheduler, manager and policies.
:mod:`~tierkv.replay.stack_distances` answers for LRU caches of all sizes in one pass, and
:mod:`~tierkv.replay.lru_stack` for stacks of them.

Invariants:

- Nothing takes time, so a result depends only on the trace and on policies, capacities and hints.
- Memory is bounded by the bound on chunks of a trace, whatever the trace and the capacities.
- A hit counts from the front of a prompt without a gap, as in a lookup.
"""
