"""What a worker tells the scheduler's side of the spec seam, since vLLM does not: which layers keep a state, and what.

``OffloadingConfig`` names the layers of each group, and says no more of them. But whether a page is a state, and in
which shapes and number formats it is kept, decides for whom it is good, which codecs may round it, and how a hit is
looked up. Workers know, and vLLM makes them before the scheduler. So the engine's first worker leaves a note in memory
that has the engine's id in its name; nothing is left behind when its process is gone, however it went.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence

from tierkv.errors import ConfigError
from tierkv.memory.shared import SharedMemory, read_named_memory

_ID_BYTES = 16


class StatesNote:
    """A worker's note, there to be found until it is closed.

    Args:
        engine_id: of vLLM's ``KVTransferConfig``; one for each engine.
        states: per group what its states are, in words; empty: it keeps none.
    """

    def __init__(self, engine_id: str, states: Sequence[str]) -> None:
        data = json.dumps(list(states)).encode()
        self._memory = SharedMemory(_name(engine_id))
        self._mapped: mmap.mmap = self._memory.map(len(data))
        self._mapped[:] = data

    def close(self) -> None:
        """Take it back. Idempotent."""
        self._memory.close()
        self._mapped.close()


def read_states(engine_id: str, num_groups: int) -> tuple[str, ...]:
    """What the engine's first worker noted.

    Raises:
        ConfigError: nothing was noted, or several engines share that id.
    """
    notes = set(read_named_memory(_name(engine_id)))
    if len(notes) > 1:
        raise ConfigError(
            f"kv_transfer_config.engine_id = {engine_id!r} is that of several engines on this machine, whose layers "
            "differ: give each an id of its own, or leave it out"
        )
    states = tuple(json.loads(notes.pop())) if notes else ()
    if len(states) != num_groups:
        raise ConfigError(
            f"vLLM's workers noted what {len(states)} of {num_groups} KV cache groups hold: TierKVSpec serves engines "
            "whose first worker runs on the scheduler's machine, as the same user; use TierKVConnector otherwise"
        )
    return states


def _name(engine_id: str) -> str:
    return "tierkv-note-" + hashlib.blake2b(engine_id.encode(), digest_size=_ID_BYTES).hexdigest()
