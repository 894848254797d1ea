"""Conformance tests of a backend alone: its verbs, as a tier calls them, without a stack.

Each module holds one mixin of tests; :class:`~tierkv.testing.conformance.BackendConformance` inherits them all.
"""
