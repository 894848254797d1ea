"""Values that all other packages share: frozen, slotted, standard library only.

- What an engine passes in: its shape, requests, blocks and steps (:mod:`~tierkv.types.engine`), and the hints of a
  request (:mod:`~tierkv.types.hints`).
- Identity of stored data: the key of a chunk (:mod:`~tierkv.types.keys`) and the namespace that makes bytes
  interchangeable (:mod:`~tierkv.types.namespace`).
- Sizes of blocks and chunks per KV cache group (:mod:`~tierkv.types.geometry`).
- Transfers between scheduler and worker (:mod:`~tierkv.types.transfers`), and operations between manager and dispatch
  (:mod:`~tierkv.types.tier_ops`).
- Answers: result of a lookup (:mod:`~tierkv.types.lookup`), account of a request (:mod:`~tierkv.types.account`), cache
  events (:mod:`~tierkv.types.cache_events`), described events (:mod:`~tierkv.types.block_events`), observations for
  policies (:mod:`~tierkv.types.observation`).
- Sizes in bytes for a reader (:mod:`~tierkv.types.sizes`), and the time of a wait (:mod:`~tierkv.types.waits`).
- The table-driven :mod:`~tierkv.types.state_machine` of chunks, requests and streams.

Invariants:

- A value never changes after it is made, and holds no reference to a component.
- Values that cross a process boundary can be pickled.
- Nothing here imports another package of tierkv, except its errors.
"""
