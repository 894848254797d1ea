"""The composition root: opening, step loop and tiers of a stack."""
