"""Prefix cache for Hugging Face transformers: KV of prompts in a stack of tiers, kept between processes.

``TieredPrefixCache(model, "stack.toml")`` works with ``model.generate`` and plain forward passes
(docs/how-to/use-with-transformers.md). Importing this package loads neither transformers nor torch.

- :mod:`~.cache`: ``TieredPrefixCache``, the public class. It checks arguments and holds the parts below.
- :mod:`~.batches`: prompts as users give them, and the arguments of ``generate``.
- :mod:`~.work`: loading, computing and storing of prompts, row by row.
- :mod:`~.engine`: a small engine over a stack. Its requests load prefixes into pages, or store filled pages.
- :mod:`~.pages`: KV in host memory in the form that a worker copies.
- :mod:`~.restored`: cache objects of transformers that prompts are restored into.
- :mod:`~.defaults`: the stack of a plain folder, and the name of a model.
- :mod:`~.results`: reports on prompts, sums over all calls, and progress.
- :mod:`~.layers`, :mod:`~.identity`: shape of a model's KV cache, and the hashes that identify a prompt under a model.

Flow of ``generate``: hash the prompt, load the longest prefix into pages, restore it into a cache, compute the rest in
pieces, store each piece, run ``model.generate``, and store the answer.

Invariants:

- A chunk is found only under equal configuration, weights, adapters, attention kernels, autocast and token ids.
- A failing tier shortens the loaded prefix and never raises.
- One thread at a time uses a ``TieredPrefixCache``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.integrations.first_use import load

if TYPE_CHECKING:
    from tierkv.integrations.transformers.cache import TieredPrefixCache as TieredPrefixCache
    from tierkv.integrations.transformers.restored import PrefixCache as PrefixCache
    from tierkv.integrations.transformers.results import CacheStats as CacheStats
    from tierkv.integrations.transformers.results import Prefix as Prefix
    from tierkv.integrations.transformers.results import PromptReport as PromptReport
    from tierkv.integrations.transformers.results import TierUse as TierUse

__all__ = ["CacheStats", "Prefix", "PrefixCache", "PromptReport", "TierUse", "TieredPrefixCache"]

_MODULES = {
    "CacheStats": "results",
    "Prefix": "results",
    "PrefixCache": "restored",
    "PromptReport": "results",
    "TierUse": "results",
    "TieredPrefixCache": "cache",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    return load(__name__, _MODULES, name)
