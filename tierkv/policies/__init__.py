"""Eviction policies that ship with tierkv, and the parts that a tier puts around any policy.

A *policy* (:class:`tierkv.abc.EvictionPolicy`) orders the readable chunks of one tier. It knows each chunk by a
*handle*, a small whole number that the tier assigns and reuses. A handle with a *pin* must not be evicted. What a
policy remembers of evicted chunks are *ghosts* (:mod:`~tierkv.policies.ghost`).

Policies: ``lru``, ``lfu``, ``arc``, ``s3-fifo`` and :mod:`~tierkv.policies.adaptive`.
:mod:`~tierkv.policies.builtin` lists them for the plugin registry.

Around a policy:

- :class:`~tierkv.policies.guarded.GuardedPolicy` wraps the policy of a plugin and replaces it when it fails.
- :class:`~tierkv.policies.quotas.TenantPolicy` holds one policy per tenant and enforces quotas.
- :class:`~tierkv.policies.eviction_list.EvictionList` counts the chunks of a tier that may be evicted now.
- :class:`~tierkv.policies.request_feed.RequestFeed` passes request observations to the policies that want them.

Flow: the tier calls ``add`` for stored chunks, ``touch`` for uses, ``release`` when the last pin ends, and ``evict``
when it needs room. A policy that has ``refuse`` is asked before a chunk is admitted.

Invariants:

- A policy does no I/O and starts no thread. All verbs run on the engine's scheduler thread.
- ``evict`` returns exactly as many unpinned handles as requested, or none.
- A verb costs O(1) amortised per handle; columns replace objects per chunk, so the garbage collector sees few objects.
"""
