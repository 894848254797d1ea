"""What a policy would have answered: requests of a trace against a tier of any size, without a byte of KV cache."""
