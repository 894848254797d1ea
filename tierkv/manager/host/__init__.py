"""The host tier: chunks in slots, the pins on them, and eviction.

Nouns: a *slot* is a place in the arena. Its *owner* is one chunk, with a *generation* that differs from all previous
owners'. A *lease* is a slot and a generation, as given to workers and dispatch. A *pin* keeps a slot; a pin for a
*write* to a lower tier does not count as use. A *waiter* is notified when a chunk becomes readable.

Flow: ``evict_for`` makes room, ``admit`` gives slots to keys, I/O fills them, ``filled`` or ``failed`` ends it. A READY
chunk without pins is evictable; the policy chooses victims. A *demoting* chunk is evicted when its write to a lower
tier has ended. ``drop`` makes a chunk invisible at once, and its slot free when the last pin ends. ``reset`` makes all
chunks *stale*: invisible by the age of its generation, at one cost however many there are. ``drop_some`` drops these
and damaged chunks in each step, within a share of the step's budget.

Parts: :mod:`chunk_state` is the table of states, :mod:`slot_table` has the columns by slot and answers questions,
:mod:`host_tier` changes them, with :mod:`dropping` for what is not evicted. :mod:`waiters` notifies, :mod:`checks`
checks the invariants, :mod:`chunk` has the values that are returned.

Invariants: free and owned slots are all slots. Every chunk that is being filled is pinned by its I/O. The policy
knows exactly the READY chunks that are not demoting. A key names at most one slot, and never that of a DOOMED chunk.
"""
