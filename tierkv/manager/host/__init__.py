"""The host tier: its chunks, slots and pins."""
