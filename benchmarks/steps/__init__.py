"""Cost of engine steps that decode, with tierkv alone and inside real vLLM beside vLLM's own tiering."""
