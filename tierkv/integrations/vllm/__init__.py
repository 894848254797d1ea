"""tierkv inside vLLM, by both seams."""
