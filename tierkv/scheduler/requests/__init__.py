"""Requests: one record per request, its state machine, hints and statistics.

:class:`~tierkv.scheduler.requests.record.RequestRecord` is the value that all other wings read and change: per group
the chunk keys, GPU block ids and the store cursor; the open lookup; the ids of jobs in flight. Its ``apply`` is the
only way to change the state, and :mod:`.request_state` has the table of legal changes. :mod:`.hint_reader` parses the
user's hints once, on arrival. :mod:`.accounting` counts which tier served which tokens. :mod:`.observations` describes
a request to the policies when it is first answered and when it ends.

Invariants: a record exists from the first call that names the request until it has finished and its last job has ended.
Keys only grow. ``next_stored``, the store cursor, never passes the last key.
"""
