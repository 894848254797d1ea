"""Lower tiers: what each holds and how fast it is."""
