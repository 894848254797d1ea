"""Reservations: chunks held in the host tier for a request."""
