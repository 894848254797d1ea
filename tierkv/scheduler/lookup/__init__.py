"""Lookups: the number of tokens of a request that can be loaded, now or after deferring.

Flow: :mod:`.lookups` keeps the open lookups; each has its :mod:`state <.open_lookup>` in the request record. It has
:mod:`.search` find the longest hit over all groups, has :mod:`.load_or_recompute` shorten it where computing is faster,
then reserves host slots for the wanted chunks. When all of them are readable in the host tier, it offers the hit.
:mod:`.first_segment` selects the part of a long hit that is gathered before the offer. :mod:`.load_cost` is the
arithmetic of load or recompute; :mod:`.prefill_rate` measures the engine.

``Lookups.answer`` and ``Lookups._resolve`` decide that the answer is None, and return through ``Lookups._defer``. There
are three reasons: a tier has not yet answered whether it has a chunk (state ASKING); wanted chunks are still in flight
to the host tier, or another request is loading them (state GATHERING); a wanted chunk was lost twice in one step.

Invariants: a lookup is deferred for at most ``lookup_deadline_s``; then the part that is readable is the answer. The
answer is the same whether it was deferred or not. An offered chunk stays held until the load starts, the engine asks
about something else, or the deadline passes. A repeated question while nothing has changed costs O(1).
"""
