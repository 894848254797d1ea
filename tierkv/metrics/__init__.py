"""What happened, as numbers."""
