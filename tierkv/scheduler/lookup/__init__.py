"""Lookups: how much of a prompt can be loaded."""
