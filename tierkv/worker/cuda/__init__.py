"""Copies between a GPU's KV tensors and the arena: enqueued on streams and observed by events; no thread waits.

:mod:`.copies` decides what a job enqueues, and :mod:`.transfer` follows it to its end. :mod:`.pages` knows the KV
tensors. :mod:`.runtime` is the interface to the GPU, with torch behind it, and :mod:`.batch_copy` the one call of the
driver that torch lacks.

A job is divided into pieces of some megabytes. So the copy threads compute the checksums of one piece while the copy
engine has the next, and several threads share the checksums of a long job.
"""
