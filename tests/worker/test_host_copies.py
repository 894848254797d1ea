"""Copies on the host's cores: what a small chunk costs a copy thread beside the move of its bytes."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from calls import calls_of

from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.transfers import SlotRef, TransferJob
from tierkv.worker.host_copies import HostCopies
from tierkv.worker.pages import HostPages
from tierkv.worker.rank_slice import RankSlice

CHUNKS = 32
PAGE_BYTES = 4096
KEYS = tuple(make_key(b"%032d" % number, 0) for number in range(CHUNKS))


@pytest.mark.parametrize(("is_store", "calls_max"), [(True, 33), (False, 37)])
def test_a_chunk_of_one_page_takes_few_calls(*, is_store: bool, calls_max: int) -> None:
    """A chunk of 64 KiB is copied and hashed in 12 us: 60 calls took as long again, a second time per hit."""
    geometry = Geometry.of(EngineSpec("m", "uint8", (GroupSpec(16, (PAGE_BYTES,)),), 16), blocks=1)
    arena = HostArena(CHUNKS * 2 * PAGE_BYTES, PAGE_BYTES)
    pages = HostPages(geometry, [[np.ones((CHUNKS, PAGE_BYTES), np.uint8)]])
    copies = HostCopies(RankSlice(arena, FrameSealer(bytes(16)), geometry), pages, lambda _: Future())
    slots = tuple(SlotRef(slot, 0) for slot in range(CHUNKS))

    def job(*, store: bool) -> TransferJob:
        return TransferJob(1, "r", store, KEYS, slots, (0,) * CHUNKS, tuple(range(CHUNKS)), (CHUNKS,), (0,))

    assert not copies._run(job(store=True)).failed
    assert not copies._run(job(store=is_store)).failed
    assert calls_of(copies._run, job(store=is_store)) <= calls_max * CHUNKS
