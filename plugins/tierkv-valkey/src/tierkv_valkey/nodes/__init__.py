"""Servers of a tier, and the way to the one that has a name.

A :class:`~tierkv_valkey.nodes.node.Node` is one server: its idle connections, and a rest after calls without an
answer. A :class:`~tierkv_valkey.nodes.wire.Wire` is one connection, and a
:class:`~tierkv_valkey.nodes.pipeline.Pipeline` one exchange with a node. A *directory*
(:mod:`~tierkv_valkey.nodes.directory`) finds the node of a name: a single server, the primary that sentinels name
(:mod:`~tierkv_valkey.nodes.sentinel`), or the owner of a slot (:mod:`~tierkv_valkey.nodes.cluster`).

The client library connects, authenticates and encrypts. Its own cluster and sentinel classes are not used: they
retry by themselves, and fail a whole batch when one node fails.
"""
