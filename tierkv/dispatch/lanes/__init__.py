"""Lanes: the paths of a tier's operations from the engine's thread to the backend and back.

A :class:`~.ticket.Ticket` is one operation in flight. The dispatcher offers it to the bounded queue of the tier's lane,
and puts its deadline on record (:mod:`.deadlines`). A lane takes tickets from its queue, has the tier perform them, and
returns them finished. :mod:`.lane` has threads of its own and calls blocking backends; :mod:`.async_lane` shares one
event loop among all async backends.

Invariants: a ticket is performed at most once, since a lane must claim it and a missed deadline takes the claim away.
An offer never waits: a full queue refuses it.
"""
