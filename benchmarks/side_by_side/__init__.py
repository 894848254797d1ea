"""Parts of the benchmark ``vllm_ab``: one workload through vLLM's own tiering and through tierkv, engine by engine."""
