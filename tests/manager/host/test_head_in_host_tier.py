"""A prompt longer than a host tier without lower tiers: as much of its head stays as fits."""

from __future__ import annotations

import pytest
from core_parts import make_core

from tierkv.manager.contract import RequestContext
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key, make_key

SLOTS, CHUNKS = 26, 40


def keys_of(prompt: bytes) -> list[Key]:
    """Key per chunk of a prompt."""
    return [make_key(b"%s %8d" % (prompt, number), 0) for number in range(CHUNKS)]


@pytest.mark.parametrize("step", [1, 5, 20])
def test_the_head_of_a_prompt_stays(step: int) -> None:
    """The chunks behind it find no room and are refused, and the next prompt finds room as before."""
    core = make_core(slots=SLOTS, tiers=())
    for prompt in (b"first", b"second"):
        keys = keys_of(prompt)
        for first in range(0, CHUNKS, step):
            offered = [(key, first + i + 1) for i, key in enumerate(keys[first : first + step])]
            grant = core.manager.prepare_store(offered, RequestContext(prompt.decode()))
            assert grant is not None
            core.manager.complete_store(grant.slots)
            core.manager.validate()
        assert len(core.host.slots.ready_prefix(tuple(keys))) == SLOTS
    assert core.counters.admissions_refused[HOST] == 2 * (CHUNKS - SLOTS)
