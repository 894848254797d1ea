"""tierkv keeps the KV cache of LLM servers alive in a stack of tiers and gives it back bit-exact.

Importing this package is cheap: no torch, no plugin, no configuration is loaded until a stack is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv._version import __version__

if TYPE_CHECKING:
    from tierkv.stack.opening import open_stack as open_stack
    from tierkv.stack.remote_worker import open_worker as open_worker
    from tierkv.stack.stack import Stack as Stack

__all__ = ["Stack", "__version__", "open_stack", "open_worker"]

_HOMES = {
    "open_stack": "tierkv.stack.opening",
    "open_worker": "tierkv.stack.remote_worker",
    "Stack": "tierkv.stack.stack",
}


def __getattr__(name: str) -> object:
    """Load the public names on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only when something is used

    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    return found
