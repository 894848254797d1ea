"""The policy ``adaptive``: what a chunk is worth is learned, from who asks for what and what comes back."""
