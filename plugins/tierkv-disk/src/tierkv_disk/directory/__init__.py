"""The directory of a disk tier: its names, its owner, its locks and its total size.

Several stacks, models and ranks share one path. ``layout`` marks the path as belonging to tierkv-disk and gives each
namespace a directory of its own, with a manifest. ``locks`` gives a namespace directory to one process at a time.
``shared`` bounds the sum of all namespaces. Growth is decided under one lock of the whole path. At the limit, closed
namespaces are removed, least recently used first. ``watch`` notices that a directory in use was removed or replaced.
``files`` makes names durable and publishes small documents atomically.

Invariants. A foreign directory is never changed. A namespace that a process has open is never removed. A file that
another process may read appears whole or not at all.
"""
