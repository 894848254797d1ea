"""Deliberate breaks of the core, each with the invariant that must notice it."""
