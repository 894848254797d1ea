"""A small Llama-style engine with a paged KV cache, for the demo, the tests and trace replays.

It is **not for serving**. It has what an engine must have so that tierkv can be shown in it: a block pool with prefix
caching, continuous batching, chunked prefill, preemption, several KV groups; and it calls a connector in the order in
which a vLLM-like engine does. It has one thing that a serving engine has not: its KV bytes and tokens depend on the
tokens alone, never on batching, so that every difference is somebody's fault (see :mod:`tierkv.reference.model`). It
pays for that, and for plain Python, with speed.

Needs torch (``pip install tierkv[torch]``). Of tierkv it knows ``tierkv.types`` and ``tierkv.errors`` only.
"""

from tierkv.reference.configs import EngineConfig, ModelConfig
from tierkv.reference.connector import KVConnector, KVConnectorWorker
from tierkv.reference.engine import Engine, StepReport
from tierkv.reference.request import RequestRecord

__all__ = [
    "Engine",
    "EngineConfig",
    "KVConnector",
    "KVConnectorWorker",
    "ModelConfig",
    "RequestRecord",
    "StepReport",
]
