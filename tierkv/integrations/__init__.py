"""Adapters to real engines. No module outside this package imports an engine.

- :mod:`~tierkv.integrations.vllm`: two adapters to vLLM, one per interface that vLLM offers.
- :mod:`~tierkv.integrations.sglang`: a storage backend of SGLang's hierarchical cache.
- :mod:`~tierkv.integrations.transformers`: continuous batching and single prompts in Hugging Face transformers.

An adapter translates: engine objects into values of :mod:`tierkv.types`, calls of the engine into calls of a stack, and
results of the stack into the engine's form. It decides nothing about caching.

Invariants:

- Importing an adapter's package imports neither the engine nor torch. Its public names are loaded on first use, after
  the version of the engine was checked (:mod:`~tierkv.integrations.first_use`).
- An adapter refuses an engine configuration that it cannot serve correctly. The message names the setting and the fix.
- A failure inside tierkv never fails a request of the engine: the engine computes instead.
"""
