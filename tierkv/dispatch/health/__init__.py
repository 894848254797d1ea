"""Health of one tier as dispatch sees it: whether it is used, whether it is written to, and what the log says of it.

:mod:`.breaker` opens after failures in a row and is closed by an answered trial. :mod:`.write_gate` counts the writes
alone with a breaker of their own, since reads of a disk that cannot be written succeed. :mod:`.failed_reads` counts the
reads alone: a tier that cannot be read is out of service. :mod:`.failure_log` has one line for what leaves or returns,
and holds repeated ones back.

Invariants: nothing here reads a clock, waits or has a thread. Only a trial ends an outage.
"""
