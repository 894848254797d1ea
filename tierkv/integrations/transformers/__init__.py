"""A prefix cache for Hugging Face transformers: KV of prompts, kept in a stack of tiers from one process to the next.

``TieredPrefixCache(model, "stack.toml")`` serves ``model.generate`` and plain forward passes; docs/how-to tells how.
Importing this package loads neither transformers nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.integrations.first_use import load

if TYPE_CHECKING:
    from tierkv.integrations.transformers.cache import TieredPrefixCache as TieredPrefixCache
    from tierkv.integrations.transformers.restored import PrefixCache as PrefixCache
    from tierkv.integrations.transformers.results import Prefix as Prefix
    from tierkv.integrations.transformers.results import PromptReport as PromptReport

__all__ = ["Prefix", "PrefixCache", "PromptReport", "TieredPrefixCache"]

_MODULES = {
    "Prefix": "results",
    "PrefixCache": "restored",
    "PromptReport": "results",
    "TieredPrefixCache": "cache",
}


def __getattr__(name: str) -> object:
    """See :func:`tierkv.integrations.first_use.load`."""
    return load(__name__, _MODULES, name)
