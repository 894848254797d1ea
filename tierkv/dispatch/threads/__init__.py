"""Threads of a stack, and their replacements in a simulation.

:mod:`.spawn` is the interface through which every thread starts; :mod:`.runtime` bundles it with the sources of time
and randomness. :mod:`.copy_pool` runs copies between slots and KV tensors, and :mod:`.batch_writer` writes a record in
batches.

Invariants: all threads are daemons, all queues are bounded, and handing over work never waits for room.
"""
