"""Memory of the host tier: one arena, private to a process or shared between processes.

Nouns:

* :class:`~tierkv.memory.arena.HostArena`: one mapping, cut into slots of one length. A slot has
  the form of a raw frame.
* :class:`~tierkv.memory.shared.SharedMemory`: owner of memory that other processes may map.
* :class:`~tierkv.memory.population.Population`: provides the pages of a private or shared arena in the background.
* *Handle*: plain data with which another process finds and maps shared memory.

Flow: the stack opens an arena over private memory. If its workers are other processes, it opens shared memory instead
and sends them a handle; each worker attaches its own arena over the same memory.

Threads: views of slots may be taken on any thread. The arena does not synchronise access: the manager's leases decide
which component may write a slot.

Invariants: a slot begins on a 4096-byte boundary and its length is a multiple of 4096, for O_DIRECT. Memory is never
unmapped while a view of it exists, so a hung thread cannot cause a segmentation fault. The length of shared memory is
sealed, so no process can truncate it under another.
"""
