"""Dense containers for a million chunks. They know keys and numbers, and nothing of tiers.

State per chunk is kept in columns by number instead of in an object per chunk. Two properties of Python decide the
shapes. A dict that is full rebuilds itself at once: with a million keys the engine's thread would stop for 60 ms, so
tables of keys are spread over 256 dicts. A full garbage collection walks over every list element by element (60 ms a
million), but not over memory views, arrays, or dicts from numbers to bytes: so no column is a list.

- :mod:`columns`: a number per chunk, in memory that grows in place.
- :mod:`key_table`: numbers for keys, and keys by number.
- :mod:`fifo_index`: keys in insertion order, each with a row.
- :mod:`key_set`: keys without an order.
- :mod:`rings`: several orders of handles in two columns, for eviction policies.
- :mod:`lease_queue`: a queue of slot leases, the front of which can be taken aside.
- :mod:`seen_filter`: recently seen keys, in 8 bytes each.
- :mod:`written_order`: ranks that backends keep, and the order of eviction at an open.
"""
