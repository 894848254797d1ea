"""One record per request."""
