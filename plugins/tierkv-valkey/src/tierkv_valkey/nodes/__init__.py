"""Servers of a tier, and the way to the one that has a name.

A :class:`~tierkv_valkey.nodes.node.Node` is one server: a pool of the client's connections, and a rest after calls
without an answer. A :class:`~tierkv_valkey.nodes.pipeline.Pipeline` is one exchange with a node. A *directory*
(:mod:`~tierkv_valkey.nodes.directory`) finds the node of a name: a single server, the primary that sentinels name
(:mod:`~tierkv_valkey.nodes.sentinel`), or the owner of a slot (:mod:`~tierkv_valkey.nodes.cluster`).

The client library connects, authenticates, encrypts and parses. Its own cluster and sentinel classes are not used: they
retry by themselves, and fail a whole batch when one node fails.
"""
