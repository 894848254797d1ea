"""Option ``--corrupt``: flip stored bytes through each backend's own verbs, without the framework.

The resulting frames are those of a failing disk or network: right key, right length, wrong bytes. The same chunks are
corrupted in every tier, so that no intact copy remains.
"""

from __future__ import annotations

import asyncio
import inspect
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

from tierkv.abc import AsyncBackend, Backend, BackendContext, ReadRequest, WriteRequest
from tierkv.config.loading import parse_config
from tierkv.config.resolving import resolve
from tierkv.errors import TierKVError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.plugins.loading import load_plugins
from tierkv.stack.opening import namespace_of
from tierkv.types.engine import EngineSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key

ONE_IN = 3
"""One chunk in three is corrupted: enough for most conversations, while most chunks still load."""


def corrupt_at_rest(stack: Mapping[str, Any], engine: EngineSpec, keys_by_tier: Mapping[str, set[bytes]]) -> int:
    """Flip one payload byte of a third of the chunks, in every tier that has them.

    Returns:
        Number of corrupted frames over all tiers.
    """
    config = parse_config(dict(stack))
    chunk = config.chunk
    geometry = Geometry.of(engine, blocks=chunk.blocks, tokens=chunk.tokens, parts=chunk.parts)
    frame_max = frame_bytes(geometry.payload_bytes_max)
    victims = _choose(keys_by_tier.values())
    damaged = 0
    for tier in resolve(config, load_plugins()).tiers:
        context = BackendContext(
            tier.config.name, namespace_of(config, engine, geometry), frame_max, tier.config.capacity
        )
        backend = tier.backend.open(context, tier.options)
        try:
            for key in keys_by_tier.get(tier.config.name, ()):
                if key in victims:
                    damaged += _flip(backend, Key(key), frame_max)
        finally:
            _call(backend.close())
    return damaged


def _choose(tiers: Iterable[set[bytes]]) -> set[bytes]:
    keys = sorted({key for tier in tiers for key in tier})
    return set(keys[::ONE_IN])


def _flip(backend: Backend | AsyncBackend, key: Key, frame_max: int) -> int:
    buffer = memoryview(mmap.mmap(-1, frame_max))  # page-aligned, as every buffer of the framework is
    (length,) = _call(backend.read_into([ReadRequest(key, buffer)]))
    if not isinstance(length, int):
        return 0
    buffer[HEADER_BYTES + (length - HEADER_BYTES) // 2] ^= 0x40
    _call(backend.delete([key]))  # a shared tier does not overwrite a stored chunk
    (error,) = _call(backend.write([WriteRequest(key, buffer[:length].toreadonly())]))
    if isinstance(error, TierKVError):
        raise error
    return 1


def _call(result: Any) -> Any:  # noqa: ANN401 - result of any verb
    """Return the result of a verb, blocking or async."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result
