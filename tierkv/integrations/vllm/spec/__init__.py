"""``TierKVSpec``: tierkv's manager and worker under vLLM's offloading connector.

- :mod:`~.spec`: the classes that vLLM creates from its configuration, once per role.
- :mod:`~.manager`: the side in the scheduler's process, a staged stack behind vLLM's ``OffloadingManager``.
- :mod:`~.containment`: keeps errors of the manager from vLLM.
- :mod:`~.worker`: the side in each worker's process, which copies pages.
- :mod:`~.failed_loads`: reports failed loads to vLLM.
- :mod:`~.shape`: translation of vLLM's ``OffloadingConfig``, which has less detail than a connector gets.
- :mod:`~.notes`: files in which a worker describes its state layers to the scheduler's process.

Flow: vLLM's scheduler decides what to look up, store and load. It asks the manager for lookups and for prepared
transfers, and hands them to the workers. The manager completes them when vLLM reports them as done.

Invariants:

- The chunk size of the stack takes precedence over vLLM's; contradicting settings are refused.
- The scheduler's side knows only the bytes per block. So each group has one page per block in the namespace.
"""
