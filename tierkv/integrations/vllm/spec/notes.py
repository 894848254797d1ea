"""Notes in shared memory in which a worker describes its layers and weights to the scheduler's process.

``OffloadingConfig`` only names the layers of each group, and the model. But tierkv must know whether a page is a state,
and its shapes and number formats: they decide which engines can use the bytes, which codecs may round them, and how a
hit is looked up. And it must know what else the KV depends on, such as the revision of the weights. Workers know all
this, and vLLM creates workers before the scheduler. So the engine's first worker writes a note into
memory whose name contains the engine's id. The memory is released with the worker's process, also after a crash.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from tierkv.errors import ConfigError
from tierkv.memory.shared import SharedMemory, read_named_memory

_ID_BYTES = 16


class Noted(NamedTuple):
    """Content of a note."""

    states: tuple[str, ...]
    """Description of the states per group; empty for groups without states."""
    revision: str = ""
    """Revision of the model, and identity of its weights."""
    words: str = ""
    """Further facts that the values of the KV depend on."""


class WorkerNote:
    """Note of a worker, readable until it is closed.

    Args:
        engine_id: id of the engine, from vLLM's ``KVTransferConfig``.
        states: description of the states per group; empty for groups without states.
        revision: revision of the model, and identity of its weights.
        words: further facts that the values of the KV depend on.
    """

    def __init__(self, engine_id: str, states: Sequence[str], revision: str = "", words: str = "") -> None:
        data = json.dumps([list(states), revision, words]).encode()
        self._memory = SharedMemory(_name(engine_id))
        self._mapped: mmap.mmap = self._memory.map(len(data))
        self._mapped[:] = data

    def close(self) -> None:
        """Remove the note. Idempotent."""
        self._memory.close()
        self._mapped.close()


def read_note(engine_id: str, num_groups: int) -> Noted:
    """Read the note of the engine's first worker.

    Raises:
        ConfigError: there is no note, or several engines share the id.
    """
    notes = set(read_named_memory(_name(engine_id)))
    if len(notes) > 1:
        raise ConfigError(
            f"kv_transfer_config.engine_id = {engine_id!r} is that of several engines on this machine, whose layers "
            "or weights differ: give each its own id, or remove it"
        )
    states, revision, words = json.loads(notes.pop()) if notes else ((), "", "")
    noted = Noted(tuple(states), revision, words)
    if len(noted.states) != num_groups:
        raise ConfigError(
            f"vLLM's workers described {len(noted.states)} of {num_groups} KV cache groups: TierKVSpec supports "
            "engines whose first worker is on the scheduler's machine, as the same user; use TierKVConnector otherwise"
        )
    return noted


def _name(engine_id: str) -> str:
    return "tierkv-note-" + hashlib.blake2b(engine_id.encode(), digest_size=_ID_BYTES).hexdigest()
