"""tierkv keeps the KV cache of LLM servers alive in a stack of tiers and gives it back bit-exact.

Importing this package is cheap: no torch, no plugin, no configuration is loaded until a stack is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.assembly import open_stack as open_stack
    from tierkv.stack import Stack as Stack
    from tierkv.worker_setup import open_worker as open_worker

__version__ = "0.1.0"
__all__ = ["Stack", "__version__", "open_stack", "open_worker"]

_HOMES = {"open_stack": "tierkv.assembly", "open_worker": "tierkv.worker_setup", "Stack": "tierkv.stack"}


def __getattr__(name: str) -> object:
    """Load the public names on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only when something is used

    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    return found
