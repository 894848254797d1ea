"""Lower tiers: a backend plus frames, codecs, checked results and retries.

Nouns:

* *Backend*: a plugin that stores frames by key; see :mod:`tierkv.abc`.
* :class:`~tierkv.tiers.tier.Tier`: wraps one backend and performs its operations: read, write, probe, delete.
* :class:`~tierkv.tiers.framing.Framer`: converts between a slot of the host arena and a frame at rest.
* :class:`~tierkv.tiers.retry.Retrier`: splits an operation into batches and retries keys whose failure may pass.
* *Key result*: outcome of one try for one key, and whether another try may help.

Flow of a read: the tier gives the backend one view per slot; the backend fills it with the frame at rest. The framer
verifies the frame and decodes it in place to a raw frame. Flow of a write: the framer checks that the slot holds the
key, encodes its payload into a staging buffer, and the backend stores the frame.

Threads: all verbs run on I/O threads or on the event loop, several at once, never on the engine's thread. The code is
written once, as coroutines; a blocking backend runs them to their end on the calling thread.

Invariants:

* A result is an outcome, never an exception: errors and contract breaches of a backend or codec end here (promise 3).
* Only a frame whose header, namespace, key and checksum were verified counts as read.
* A frame is written only from a slot that holds its key.
* A backend's views of slots are released when its call returns. A backend that does not declare
  ``reads_end_with_call`` gets no view of a slot to read into (:mod:`tierkv.tiers.read_buffers`).
* No try starts after the deadline of its operation.
"""
