"""Checks of the simulation: the promises, compared with the state of the stack after each step.

A broken promise raises :class:`~simulation.checks.failure.Violation` with the name of the invariant.
"""
