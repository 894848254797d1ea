"""Events for engines and routers: which blocks became available in a tier, or were removed.

Flow: the manager logs raw cache events, which know keys only. :mod:`.block_events` takes a *snapshot* of a chunk's
tokens and hashes when its store is granted, and describes later events by it. :mod:`.event_queue` keeps events until
the engine takes them.

Invariants: a snapshot is kept while a store of its chunk is in flight or a tier holds the chunk. At most
``SNAPSHOTS_MAX`` snapshots and a bounded number of keys in events of earlier steps are kept; drops are counted. Dropped
events leave one event CLEARED per tier.
"""
