"""A small engine over a real stack, and the answer it must give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.reference.configs import EngineConfig, ModelConfig
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack
from tierkv.testing.faults import FaultyBackend

ENGINE = EngineConfig(
    model=ModelConfig(
        layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, intermediate=96, vocab=211, dtype="float32"
    ),
    num_blocks=40,
    block_tokens=8,
    max_batched_tokens=64,
    max_running=4,
)
"""A pool of 312 tokens. A block has 2 layers x 2 KiB; a chunk of two blocks takes a slot of 12 KiB."""

CHUNK_TOKENS = 16
SLOT_BYTES = 12 * 1024
ANSWER = 8


def prompts_of(seed: int, count: int, length: int = 120, shared: int = 40) -> list[list[int]]:
    """Prompts with a common beginning."""
    rng = random.Random(seed)
    system = [rng.randrange(1, 211) for _ in range(shared)]
    return [system + [rng.randrange(1, 211) for _ in range(length - shared)] for _ in range(count)]


def stack_config(place: Path, *, host_slots: int = 24, **changes: Any) -> dict[str, Any]:
    """Host, disk and a file-based object store."""
    config: dict[str, Any] = {
        "chunk": {"tokens": CHUNK_TOKENS},
        "host": {"capacity": host_slots * SLOT_BYTES},
        "tiers": [
            {"backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0},
            {"name": "objects", "backend": "fsspec", "url": f"file://{place}/objects"},
        ],
    }
    return {**config, **changes}


def serve(stack: Stack | None, prompts: list[list[int]], config: EngineConfig = ENGINE) -> list[list[int]]:
    """Answers of a fresh engine: nothing of an earlier one is in its pool."""
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch, where a test needs it

    engine = Engine(config, connector=stack)
    records = engine.generate(prompts, ANSWER)
    return [list(record.output_tokens) for record in records]


@contextmanager
def opened(config: Mapping[str, Any], engine: EngineConfig = ENGINE, **options: Any) -> Iterator[Stack]:
    """An open stack that is closed, whatever happens."""
    stack = open_stack(config, engine.engine_spec(), **options)
    try:
        yield stack
    finally:
        stack.close(timeout_s=5.0)


@dataclass
class Faults:
    """The tiers of a stack, made to fail from a test: a plugin registry in which a backend is wrapped."""

    backends: list[FaultyBackend] = field(default_factory=list)
    prepare: Callable[[FaultyBackend], object] | None = None
    """Called with each backend that is opened from now on, to add rules that hold from the start."""

    def registry(self, name: str = "disk") -> Any:
        """Installed plugins, with every backend called ``name`` wrapped under the name ``faulty``."""
        inner = load_plugins().require_backend(name).plugin

        def open_faulty(context: BackendContext, options: Any) -> FaultyBackend:
            backend = FaultyBackend(inner.open(context, options))  # type: ignore[arg-type]
            self.backends.append(backend)
            if self.prepare is not None:
                self.prepare(backend)
            return backend

        plugin: BackendPlugin = replace(inner, name="faulty", open=open_faulty, check=None)

        class FaultyPlugin:
            TIERKV_SPI = 1

            @hookimpl
            def tierkv_backends(self) -> list[BackendPlugin]:
                return [plugin]

        return load_plugins([FaultyPlugin()])

    @property
    def last(self) -> FaultyBackend:
        """The backend that was opened last."""
        return self.backends[-1]
