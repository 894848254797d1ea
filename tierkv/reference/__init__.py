"""Small Llama-style engine with a paged KV cache, for the demo, the tests and trace replays. Not for serving.

Of the small engines, only this one runs a model: it shows that loaded KV gives the same tokens as computed KV.

Nouns: a *request* holds *blocks* of the *block pool* in one *block table* per KV group. The *scheduler* decides a step:
continuous batching, chunked prefill, preemption. The *decoder* runs it over the paged *KV pool* of each rank. A
*connector* (for example a tierkv stack) loads and stores KV.

Flow of a step: the scheduler asks the connector for each waiting request, allocates blocks and builds a ``StepOutput``;
the connector's workers start transfers; the decoder computes; the workers queue stores; the engine takes in new tokens
and ended loads. The calls have the order in which a vLLM-like engine makes them (:mod:`tierkv.reference.connector`).

Invariants:

- KV bytes and tokens depend on the tokens alone, never on batching. So every difference is a fault of the cache
  (:mod:`tierkv.reference.model`). The engine pays for that, and for plain Python, with speed.
- A block is held or free, never both; a request preempts only younger ones, so the oldest always progresses.
- The blocks of a load stay with their request until the load has ended, also after an abort.

Needs torch (``pip install tierkv[torch]``), but for the block pool. Of tierkv it imports ``tierkv.types`` and
``tierkv.errors`` only.
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
    """Import a public name on first use: the command line reads configurations and must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv.reference' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"tierkv.reference.{_HOMES[name]}"), name)
    return found
