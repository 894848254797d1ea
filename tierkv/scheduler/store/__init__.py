"""Stores: the chunks of a request that are offered to the host tier, and the step in which they are offered.

Flow: a store plan decides when: :mod:`.immediate` in the step that computes the blocks, :mod:`.eager` one step later,
:mod:`.lazy` shortly before the engine reuses the blocks; :mod:`.plans` selects one. :mod:`.candidates` selects the
storable chunks and their source blocks. :mod:`.stores` offers them to the manager and builds one or more jobs from the
chunks that were granted a slot.

Invariants: a cursor per group (``next_stored``) passes each chunk once, unless a failed load or a reset moves it back.
Chunks are offered from the front, up to ``store_chunks_per_step_max`` beyond those that the step completes. The blocks
of a store are fenced as soon as the engine may reuse them.
"""
