"""The offload manager: the state of every chunk in every tier, and the moves between tiers. Sans-IO.

Nouns: a *chunk* is a run of KV cache with a key. The *host tier* keeps chunks in slots of one arena. *Lower tiers*
keep them as frames in backends, the fastest first. A *pin* keeps the slot of a chunk. A *passage* is the chunks of one
hit on their way to the GPU. An *instruction* (``TierOp``) tells dispatch to probe, read, write or delete chunks in one
tier.

Flow per engine step: ``begin_step`` sets the time and does bounded background work. The scheduler asks with ``lookup``
and ``resident_prefix``, collects the chunks of a hit with ``passages``, and transfers with ``prepare_load`` and
``prepare_store``; their ``complete_*`` twins follow when a worker reports. ``on_completion`` applies the reports of
dispatch, and ``take_ops`` returns the instructions for it. ``take_events`` returns what was stored and removed.

Wings, in the order of their layers: ``host`` (slots, pins, eviction), ``lower`` (one lower tier), ``moves`` (between
tiers), ``passages`` (chunks of hits on their way to the GPU). :class:`~tierkv.manager.manager.OffloadManager` holds
them.

Invariants:

- A slot has one owner, and is free again only when nothing uses it: no late completion writes into another chunk.
- A chunk is readable only after its I/O succeeded.
- No call waits. A store never waits for a lower tier; a request that waits for chunks always progresses (decision 15).
- Work per step is bounded, and so is everything that is remembered.
- The bytes of a tier with an index never exceed its capacity, writes under way included.
"""
