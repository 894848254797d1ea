"""Per request: the chunks to load, the chunks to store, and when a lookup is deferred. Sans-IO.

One :class:`~tierkv.scheduler.scheduler.OffloadScheduler` serves an engine that runs its own steps. Nouns:

- a *request record* (:mod:`.requests`): keys, block tables, state and statistics of one request;
- a *lookup* (:mod:`.lookup`): the question how many tokens of a request can be loaded, and its state;
- a *load* (:mod:`.load`): chunks on their way into allocated GPU blocks, in one job or as a stream of segments;
- a *store* (:mod:`.store`): computed blocks on their way into the host tier;
- a *job* (:mod:`.jobs`): one transfer that workers perform, with the *fences* on the blocks that it uses;
- an *event* (:mod:`.events`): a chunk became readable in a tier, or was removed from it.

Flow of one step: ``begin_step`` sets the time, releases abandoned lookups and lets streams gather.
``get_num_new_matched_tokens`` answers a lookup with a number of tokens, or with None. ``update_state_after_alloc``
turns the answer into a load job. ``build_connector_meta`` updates block tables, offers chunks for storing, and hands
loads, stores and flushes to the workers. ``update_connector_output`` takes the workers' reports and ends jobs.

A lookup answers None (ask again in the next step) at two places. ``Lookups.answer`` and ``Lookups._resolve`` in
:mod:`~tierkv.scheduler.lookup.lookups` decide it for a request that can be looked up, and return through
``Lookups._defer``. ``OffloadScheduler.get_num_new_matched_tokens`` decides it for one with transfers in flight.

Invariants, checked by :func:`~tierkv.scheduler.introspection.check_scheduler`:

- I1: the jobs in flight of a request are one load, or stores, or none;
- an open lookup belongs to a request in state ASKING, GATHERING or OFFERED, and ends within its deadline;
- I3: a block that a request no longer owns is fenced until every job that reads or fills it has ended;
- every job belongs to a request or is fenced; a finished request is forgotten with its last job.

:mod:`.staged` serves engines that have a scheduler of their own, and shares only the manager with the rest.
"""
