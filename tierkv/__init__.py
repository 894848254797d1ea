"""Tiered storage for the KV cache of LLM servers: chunks move between host memory and lower tiers, bit-exact.

An engine describes itself with an :class:`EngineSpec` and opens a :class:`Stack`. In each step it asks for hits, hands
the returned instructions to its workers, and reports what they have done. An engine that schedules itself opens a
:class:`StagedStack` instead. A worker in a process of its own is opened with :func:`open_worker`. Every error is a
:class:`TierKVError`.

Importing this package loads neither torch nor plugins nor configuration: each name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv._version import __version__

if TYPE_CHECKING:
    from tierkv.errors import TierKVError as TierKVError
    from tierkv.metrics.serving import serve_metrics as serve_metrics
    from tierkv.stack.opening import open_stack as open_stack
    from tierkv.stack.opening import open_staged_stack as open_staged_stack
    from tierkv.stack.remote_worker import open_worker as open_worker
    from tierkv.stack.stack import Stack as Stack
    from tierkv.stack.staged import StagedStack as StagedStack
    from tierkv.types.engine import EngineCapabilities as EngineCapabilities
    from tierkv.types.engine import EngineSpec as EngineSpec
    from tierkv.types.engine import GroupSpec as GroupSpec
    from tierkv.types.engine import LoadReport as LoadReport
    from tierkv.types.engine import ScheduledRequest as ScheduledRequest
    from tierkv.types.engine import StepOutput as StepOutput

__all__ = [
    "EngineCapabilities",
    "EngineSpec",
    "GroupSpec",
    "LoadReport",
    "ScheduledRequest",
    "Stack",
    "StagedStack",
    "StepOutput",
    "TierKVError",
    "__version__",
    "open_stack",
    "open_staged_stack",
    "open_worker",
    "serve_metrics",
]

_MODULES = {
    "open_stack": "tierkv.stack.opening",
    "open_staged_stack": "tierkv.stack.opening",
    "open_worker": "tierkv.stack.remote_worker",
    "serve_metrics": "tierkv.metrics.serving",
    "Stack": "tierkv.stack.stack",
    "StagedStack": "tierkv.stack.staged",
    "EngineSpec": "tierkv.types.engine",
    "GroupSpec": "tierkv.types.engine",
    "EngineCapabilities": "tierkv.types.engine",
    "StepOutput": "tierkv.types.engine",
    "ScheduledRequest": "tierkv.types.engine",
    "LoadReport": "tierkv.types.engine",
    "TierKVError": "tierkv.errors",
}


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only when a name is used

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
