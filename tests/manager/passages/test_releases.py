"""Releases of slots after a load: a part of them in each step, the tail of the prefix first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from core_parts import Core, make_core

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import SlotRef

CHUNKS = 512
STEP_KEYS = 64


def count_leases(core: Core, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of leases that each look at some has, from now on."""
    counts: list[int] = []
    leased = core.host.slots.leased

    def count(leases: Iterable[SlotRef]) -> list[int]:
        some = [*leases]
        counts.append(len(some))
        return leased(some)

    monkeypatch.setattr(core.host.slots, "leased", count)
    return counts


def test_the_end_of_a_load_releases_a_part_of_its_chunks_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of any length ends its load in one call, so this call must not release all of its chunks.

    Until then they count under the cap, and the chunk that is released last is the head: it is evicted last.
    """
    keys = tuple(Key(make_key(b"chunk %d" % i, 0)) for i in range(CHUNKS))
    core = make_core(slots=CHUNKS, step_keys=STEP_KEYS)
    for first in range(0, CHUNKS, 8):
        core.put(keys[first : first + 8])
        core.begin()
    core.manager.passages.reserve("a", keys)
    grant = core.manager.prepare_load(keys, RequestContext("a"))
    account = core.manager.passages.account
    assert (core.host.room, account.copying) == (0, CHUNKS)
    core.begin()
    looked = count_leases(core, monkeypatch)
    core.manager.complete_load(grant.slots)
    steps, room = 0, core.host.room
    assert sum(looked) == room, "no lease is looked at before its slot is released"
    assert 0 < room <= STEP_KEYS * SLOTS_PER_KEY
    while core.host.room < CHUNKS:
        core.manager.validate()
        assert account.copying == CHUNKS - core.host.room
        assert core.host.slots.pins[grant.slots[-1].slot] == 0, "the tail is released first"
        assert core.host.slots.pins[grant.slots[0].slot] == 1, "the head is released last"
        core.begin()
        assert 0 < core.host.room - room <= STEP_KEYS * SLOTS_PER_KEY
        steps, room = steps + 1, core.host.room
    assert steps > 1
    assert account.total == 0
    core.manager.validate()


def test_a_failed_load_drops_a_part_of_its_chunks_in_each_step() -> None:
    """A damaged prompt of any length fails in one report, so this call must not drop all of its chunks.

    The head goes first: without it no prefix is found that has the others.
    """
    keys = tuple(Key(make_key(b"chunk %d" % i, 0)) for i in range(CHUNKS))
    core = make_core(slots=CHUNKS, step_keys=STEP_KEYS)
    for first in range(0, CHUNKS, 8):
        core.put(keys[first : first + 8])
        core.begin()
    who = RequestContext("a")
    grant = core.manager.prepare_load(keys, who)
    core.begin()
    core.manager.complete_load(grant.slots, grant.slots[1:])
    assert core.manager.present_prefix(keys, 0, CHUNKS, who) == 1
    steps, left = 0, CHUNKS
    while left > 1:
        assert 0 < left - len(core.ready()) <= STEP_KEYS * SLOTS_PER_KEY
        left = len(core.ready())
        assert core.ready() == {keys[0], *keys[CHUNKS - left + 1 :]}
        assert core.host.dropping.is_idle == (left == 1), "as long as chunks are left, a step must follow"
        core.manager.validate()
        core.begin()
        steps += 1
    assert steps > 1
    assert (core.counters.chunks_loaded, core.counters.chunks_corrupt) == (1, {"host": CHUNKS - 1})
    while core.host.room < CHUNKS:
        core.begin()
    assert core.host.free == CHUNKS - 1
    core.manager.validate()


def test_a_damaged_chunk_that_was_evicted_meanwhile_is_not_dropped_from_its_successor() -> None:
    """Its slot may have another owner when its turn comes, which is whole."""
    keys = tuple(Key(make_key(b"chunk %d" % i, 0)) for i in range(CHUNKS))
    core = make_core(slots=CHUNKS, step_keys=STEP_KEYS)
    for first in range(0, CHUNKS, 8):
        core.put(keys[first : first + 8])
        core.begin()
    grant = core.manager.prepare_load(keys, RequestContext("a"))
    core.begin()
    core.manager.complete_load(grant.slots, grant.slots)
    core.begin()
    others = tuple(Key(make_key(b"other %d" % i, 0)) for i in range(core.host.room))
    assert core.host.free < len(others), "some damaged chunks were released, and not dropped yet"
    core.put(others)
    while not core.host.dropping.is_idle:
        core.begin()
    assert core.ready() == set(others)
    core.manager.validate()
