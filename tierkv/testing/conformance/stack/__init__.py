"""Conformance tests of a backend below a real small stack: data, faults, deadlines, room and flow.

Each module holds one mixin of tests; :class:`~tierkv.testing.conformance.BackendConformance` inherits them all.
"""
