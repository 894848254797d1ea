"""A prefix cache for Hugging Face transformers: KV of prompts, kept in a stack of tiers from one process to the next.

``TieredPrefixCache(model, "stack.toml")`` serves ``model.generate`` and plain forward passes; docs/how-to tells how.
Importing this package loads neither transformers nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.integrations.transformers.cache import TieredPrefixCache as TieredPrefixCache
    from tierkv.integrations.transformers.restored import PrefixCache as PrefixCache
    from tierkv.integrations.transformers.results import Prefix as Prefix
    from tierkv.integrations.transformers.results import PromptReport as PromptReport

__all__ = ["Prefix", "PrefixCache", "PromptReport", "TieredPrefixCache"]

_HERE = "tierkv.integrations.transformers"
_HOMES = {
    "Prefix": f"{_HERE}.results",
    "PrefixCache": f"{_HERE}.restored",
    "PromptReport": f"{_HERE}.results",
    "TieredPrefixCache": f"{_HERE}.cache",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use, after a look at the version of transformers (PEP 562).

    Raises:
        AttributeError: there is no such name.
        EngineVersionError: this version of transformers is not served.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    import importlib  # noqa: PLC0415 - only when something is used

    from tierkv.integrations.transformers.versions import check_installed  # noqa: PLC0415 - (the same)

    check_installed()
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    return found
