"""Tokens of stored chunks in a file, so that the next process can describe what its disks still hold.

Three nouns. A *snapshot* is everything that an event reports about a chunk
(:mod:`tierkv.scheduler.events.snapshots`); :mod:`.packing` turns it into bytes. The ``TokenFile`` is an SQLite
database with one row per chunk. The ``TokenWriter`` takes the changes of a step from the engine's thread, and writes
them on a thread of its own.

Flow: a lower tier that lists its content acknowledges a chunk; its snapshot becomes a row. The last tier loses the
chunk; the row is deleted. A stack opens; rows of chunks that its tiers list are restored, and announced in events.

Invariants. The engine's thread never waits for the file. Rows, and changes that wait, are bounded; dropped ones are
counted. A row counts only if its checksum, namespace, key and sizes are right, and even then no byte of it reaches an
engine's KV cache: a wrong row misleads a router, never a model. Only the user of the process can read the file, because
tokens are prompts.
"""
