"""Replay of request traces against eviction policies, without KV data.

A *trace* (:mod:`~tierkv.replay.trace`) lists requests with their times and chunk ids. :mod:`~tierkv.replay.replaying`
plays them against one policy with a given capacity, as the host tier would drive it, and counts hits and writes.
:mod:`~tierkv.replay.bounds` provides two references: Belady's choice, which knows the future, and first in, first out.

Invariants:

- Nothing takes time and nothing is pinned, so a result depends only on trace, policy and capacity.
- A hit counts from the front of a prompt without a gap, as in a lookup.
"""
