"""Lower tiers as the manager sees them: which chunks each contains, its room, its phase and its read speed.

Nouns: a tier with an *authoritative index* belongs to this stack, and every chunk in it is known. A *shared* tier is
used by other processes, so presence is *probed*, and answers are kept for a while. *Residency* is the account of one
tier: used and reserved bytes, and reads, writes and deletions under way. The *write queue* has the chunks that wait to
be written. The *phase* is a table: serving, down, emptying after a reset, detached.

Flow: ``presence`` answers a lookup with HIT, MISS or RETRY; RETRY leads to a probe. ``wants`` and ``missing`` choose
chunks to write. ``evict_for`` schedules deletions before the tier is full, and ``take_deletions`` returns them once per
step. An acknowledged write is ``stored``; a write that failed is *uncertain* until its deletion is confirmed.

Parts: :mod:`row_table` has the columns by chunk and answers questions, :mod:`residency` changes them, with a
:mod:`deletions` queue. :mod:`lower_tier` adds phase, answers and write queue. :mod:`tier_list` has all tiers in order.

Invariants: used plus reserved bytes stay within the capacity. The policy knows exactly the chunks that are stored and
not being deleted. No chunk is written and deleted at the same time.
"""
