"""Conformance tests of a backend alone: the verbs, as the tier calls them, without a stack.

Each module holds one mixin of tests; :class:`~tierkv.testing.conformance.BackendConformance` inherits them all.
"""
