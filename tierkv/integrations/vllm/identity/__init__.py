"""Identity of weights, of adapters, and of the settings that change KV: vLLM names weights by path only."""
