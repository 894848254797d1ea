"""Defaults of a ``TieredPrefixCache``: the stack of a plain folder, and the model's name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.config import StackConfig, load_config, parse_config
from tierkv.errors import ConfigError
from tierkv.integrations.transformers.layers import KvShape, Model

MIB = 2**20
HOST_BYTES_MIN, HOST_BYTES_MAX, HOST_CHUNKS = 64 * MIB, 512 * MIB, 64
"""Host memory of the default stack: as many chunks, within these bounds."""
DISK_BYTES = 8 * 1024 * MIB
SEGMENT_BYTES, SEGMENT_CHUNKS = 64 * MIB, 4
"""Size of the first file on disk, which is allocated at once; more where a chunk is large."""

_FILES = (".toml", ".yaml", ".yml", ".json")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<model>[^/]+)/snapshots/[^/]+/?$")


def stack_config(stack: StackConfig | Mapping[str, Any] | str | Path, shape: KvShape, block_tokens: int) -> StackConfig:
    """Return the description that a user gives, or that of a folder.

    Raises:
        ConfigError: the description is wrong.
    """
    if isinstance(stack, StackConfig):
        return stack
    if isinstance(stack, Mapping):
        return parse_config(stack)
    if not isinstance(stack, str | os.PathLike):
        raise ConfigError(f"stack = {stack!r:.80}: give a folder for the chunks, or the file of a stack")
    if not str(stack).strip():
        raise ConfigError('stack = "": give a folder for the chunks, or the file of a stack')
    path = Path(stack)
    if path.suffix.lower() in _FILES:
        return load_config(path)
    return parse_config(folder_stack(path, block_tokens * sum(map(shape.token_bytes, shape.groups))))


def folder_stack(folder: Path, chunk_bytes: int) -> Mapping[str, Any]:
    """Describe a stack of some host memory over a folder. A folder that is in use is an error, not a tier left out."""
    disk = {
        "backend": "disk",
        "path": str(folder),
        "capacity": DISK_BYTES,
        "segment_bytes": max(SEGMENT_BYTES, SEGMENT_CHUNKS * chunk_bytes),
        "required": True,
    }
    host_bytes = min(max(HOST_BYTES_MIN, HOST_CHUNKS * chunk_bytes), HOST_BYTES_MAX)
    return {"host": {"capacity": host_bytes}, "tiers": (disk,)}


def model_name(model: Model) -> str:
    """Name of the model as a person knows it: the one on the hub, the last folder of its path, or class and size."""
    name = str(getattr(model.config, "_name_or_path", "") or "").replace("\\", "/").rstrip("/")
    if found := _SNAPSHOT.search(name):
        return f"{found['owner']}/{found['model']}"
    if name.startswith((".", "/", "~")) or Path(name).is_dir() or name.count("/") > 1:
        name = Path(name).name
    return name or f"{type(model).__name__}-{_size(sum(weights.numel() for weights in model.parameters()))}"


def _size(count: int) -> str:
    """Number of parameters, as models are named by it: 270M, 7B."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
