"""A small Llama-style engine with a paged KV cache, for the demo, the tests and trace replays.

It is **not for serving**. It has what an engine must have so that tierkv can be shown in it: a block pool with prefix
caching, continuous batching, chunked prefill, preemption, KV groups with full attention and with sliding windows, heads
split over ranks; and it calls a connector in the order in which a vLLM-like engine does. It has one thing that a
serving engine has not: its KV bytes and tokens depend on the tokens alone, never on batching, so that every difference
is somebody's fault (see :mod:`tierkv.reference.model`). It pays for that, and for plain Python, with speed.

Needs torch (``pip install tierkv[torch]``). Of tierkv it knows ``tierkv.types`` and ``tierkv.errors`` only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.reference.configs import EngineConfig as EngineConfig
    from tierkv.reference.configs import ModelConfig as ModelConfig
    from tierkv.reference.connector import KVConnector as KVConnector
    from tierkv.reference.connector import KVConnectorWorker as KVConnectorWorker
    from tierkv.reference.engine import Engine as Engine
    from tierkv.reference.engine import StepReport as StepReport
    from tierkv.reference.request import RequestRecord as RequestRecord

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "configs",
    "KVConnector": "connector",
    "KVConnectorWorker": "connector",
    "ModelConfig": "configs",
    "RequestRecord": "request",
    "StepReport": "engine",
}

__all__ = ["Engine", "EngineConfig", "KVConnector", "KVConnectorWorker", "ModelConfig", "RequestRecord", "StepReport"]


def __getattr__(name: str) -> object:
    """Load a public name on first use: the command line reads configurations and must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv.reference' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"tierkv.reference.{_HOMES[name]}"), name)
    return found
