"""Loads: from an offered hit to filled GPU blocks.

Flow: :mod:`.load_plan` maps the keys of the hit to the blocks that the engine allocated. :mod:`.loads` sends the plan
as one job if all of it was gathered, and one call can make the job. Otherwise the load is a
:class:`~tierkv.scheduler.load.stream.Stream`: a sequence of *segments*, one job each. While one segment is copied to
the GPU, the next is gathered in the host tier, if it is not held already.
:mod:`.stream_state` has the table of a stream's states.

A chunk that cannot be loaded *cuts* its stream: chunks at or behind it are *void*. The last job names them with void
slots, so that the engine computes their tokens.

Invariants: at most one segment of a stream is copied at a time, except in a step that may be the last. The last job is
the last to end. Each chunk is read once. A stream whose tier moves nothing for ``lookup_deadline_s`` is cut.
"""
