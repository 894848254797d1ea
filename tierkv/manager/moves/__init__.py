"""Moves of chunks between tiers."""
