"""Lookups: the number of tokens of a request that can be loaded, now or after deferring.

Flow: :mod:`.lookups` keeps the open lookups; each has its :mod:`state <.open_lookup>` in the request record. It has
:mod:`.search` find the longest hit over all groups, has :mod:`.load_or_recompute` shorten it where computing is
faster, then reserves host slots for the wanted chunks. When all of them are readable in the host tier, it offers the
hit. :mod:`.questions` asks the manager within the budget of the step. :mod:`.loads_in_flight` knows what other
requests are loading. :mod:`.read_ahead` reads for requests that the engine has not asked about; :mod:`.engine_cache`
estimates what the engine has itself. :mod:`.first_segment` selects the part of a long hit that is gathered before the
offer. :mod:`.load_cost` is the arithmetic of load or recompute; :mod:`.prefill_rate` measures the engine.

``Lookups.answer`` and ``Lookups._resolve`` decide that the answer is None, and return through ``Lookups._defer``. There
are three reasons: a tier has not yet answered whether it has a chunk (state ASKING); wanted chunks are still in flight
to the host tier, or another request is loading them (state GATHERING); a wanted chunk was lost twice in one step.

Invariants: when a tier at work for a lookup has moved nothing for ``lookup_deadline_s``, the part that is readable is
the answer. The answer is the same whether it was deferred or not. An offered chunk stays held until the load starts,
the engine asks about something else, or another request needs the slot while the engine asks about that one only. A
repeated question while nothing has changed costs O(1).
"""
