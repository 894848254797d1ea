"""Record of a stack in service: one line per happening, for ``tierkv explain``.

Four nouns. An *entry* is a small dict: its kind, the engine step, the time, and what happened (``entries``). The
``Recorder`` implements the journal of a stack: it turns answers, jobs, operations, events and requests into entries,
on the engine's thread. The ``RecordWriter`` takes a batch of entries per step and writes lines on a thread of its own.
``reading`` and ``rendering`` turn a record into the entries of one key, one request or all failures, and into text.

The flow is one-way: stack, recorder, writer, file, reader. Nothing in a stack depends on its record. A stack without
one makes no call for it.

Invariants. The engine's thread never waits for the disk. Pending entries, the size of a file and the number of files
are bounded; dropped entries are counted and noted in the record. A record is readable while it is written: every line
is complete, except possibly the last one of a killed process.
"""
