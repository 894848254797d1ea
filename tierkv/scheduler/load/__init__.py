"""Loads: from answer to GPU blocks."""
