"""Stores: which chunks are offered, and when."""
