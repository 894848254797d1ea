"""Moves of chunks between the host tier and lower tiers.

Down: *cascades* write chunks when they become readable or are reused (write-through, write on reuse). *Demotions* write
chunks when the host tier is about to evict them (write-back). Up: *promotions* read chunks that a passage needs.
*Admissions* decide which chunks get host slots, and evict for them. *Room* in lower tiers is made by evictions there; a
tail whose head was evicted while it was written leaves, too.

Rules that restrict moves: a *dirty pin* keeps a chunk that waits for a write from eviction, under a bound. The *write
mask* of a slot lists the tiers that its chunk may not be written to. *Retention* has lifetimes and one-shot chunks.
*Forgetting* lets given chunks expire at once.

Flow per step: :class:`~tierkv.manager.moves.tier_io.TierIO` collects what is due into instructions, and
:class:`~tierkv.manager.moves.in_flight.InFlightOps` keeps each until dispatch reports its end. An instruction past its
deadline is reported late once: its request goes on without it, and its slots stay held until the I/O ends.

Invariants: an instruction in flight holds its slots. A store never waits for a write: chunks that cannot be written in
time are dropped and counted. Every pinned chunk waits in a write queue.
"""
