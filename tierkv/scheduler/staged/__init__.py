"""Lookups and jobs for an engine that has a scheduler of its own and stages chunks in host memory.

Such an engine asks chunk by chunk, names transfers by their chunks, and does not report failed loads. Flow:
:mod:`.staged_lookups` answers each question from what is readable or already asked, and at the end of the step reserves
the chunks that the engine wanted. :mod:`.staged_jobs` matches the engine's completions with transfers in flight.

Invariants: HIT means readable and held for the request. A request is deferred for at most the lookup deadline. After a
reset, slots of transfers in flight stay taken until the workers' completion flags show that the transfers have ended.
"""
