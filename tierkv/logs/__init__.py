"""Log lines of a stack: one table of events, and one place where their rate is limited.

An *event* (:mod:`tierkv.logs.definitions`) has a name, a level, a text and fields. Components report events to the
:class:`~tierkv.logs.stack_log.StackLog` of their stack. It writes the first event of each kind and tier at once. Later
ones are counted for an interval, and the next line carries their number.

Scheduler and manager report nothing. Their counters are read by the stack, which reports what has grown.

All lines go to the logger ``tierkv.stack``; plugins log under the names of their own packages.
"""
