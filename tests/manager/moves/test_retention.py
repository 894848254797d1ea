"""Lifetimes and one-shot chunks: bounded, cheap, and never removed while they are held."""

from __future__ import annotations

import pytest
from core_parts import disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.manager.moves import retention as module
from tierkv.manager.moves.retention import HELD_SKIPPED_MAX, Retention
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, make_keys

SWEPT_MAX = 64
KEYS = make_keys([i.to_bytes(8, "big") for i in range(300)], 0)
ONE_SHOT = RequestHints(one_shot=True)


def nowhere(_key: Key) -> None:
    """No lower tier has it."""


def test_empty_books_are_not_looked_into() -> None:
    """A stack without hints pays nothing: nothing is recorded, however much is stored and used."""
    retention = Retention(8)
    retention.stored(KEYS, NO_HINTS, 0.0, nowhere)
    retention.used(KEYS, NO_HINTS, 0.0)
    assert not retention.any


def test_one_step_sweeps_a_bounded_number() -> None:
    """A thousand chunks that end at once must not end in one step; but all of them end."""
    retention = Retention(8)
    retention.stored(KEYS, RequestHints(ttl_s=1.0), 0.0, nowhere)
    gone: list[Key] = []

    def remove(key: Key) -> bool:
        gone.append(key)
        return True

    assert retention.sweep(0.9, SWEPT_MAX, remove) == SWEPT_MAX
    assert not gone
    retention.sweep(1.0, SWEPT_MAX, remove)
    assert len(gone) == SWEPT_MAX
    for _ in range(len(KEYS) // SWEPT_MAX):
        retention.sweep(1.0, SWEPT_MAX, remove)
    assert sorted(gone) == sorted(KEYS)
    assert not retention.any


def test_one_that_cannot_go_does_not_hold_up_the_others() -> None:
    """A chunk that is read for an hour waits at the end of the line."""
    retention = Retention(8)
    retention.stored(KEYS, RequestHints(ttl_s=1.0), 0.0, nowhere)
    stuck = set(KEYS[:SWEPT_MAX])
    for _ in range(20):
        retention.sweep(1.0, SWEPT_MAX, lambda key: key not in stuck)
    assert set(retention.lifetimes) == stuck


def test_lifetimes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bound the oldest is forgotten: memory does not grow with the number of chunks ever stored."""
    monkeypatch.setattr(module, "LIFETIMES_MAX", 10)
    retention = Retention(8)
    retention.stored(KEYS, RequestHints(ttl_s=1.0), 0.0, nowhere)
    assert set(retention.lifetimes) == set(KEYS[-10:])


def test_one_shot_marks_are_bounded() -> None:
    """No more marks than slots: the rest have left already."""
    retention = Retention(8)
    retention.stored(KEYS, ONE_SHOT, 0.0, nowhere)
    taken = [retention.take_one_shot(lambda _: True) for _ in range(9)]
    assert taken == [*KEYS[-8:], None]


def test_held_chunks_are_passed_over_within_a_bound() -> None:
    """A search for a slot looks at few held chunks, and they keep their marks for later."""
    retention = Retention(100)
    retention.stored(KEYS[:100], ONE_SHOT, 0.0, nowhere)
    looked: list[Key] = []

    def held(key: Key) -> bool:
        looked.append(key)
        return False

    assert retention.take_one_shot(held) is None
    assert len(looked) == HELD_SKIPPED_MAX
    assert retention.take_one_shot(lambda _: None) is None, "all are gone"
    assert not retention.any


def test_a_chunk_that_a_load_holds_outlives_its_time() -> None:
    """Never wrong bytes: what is being copied to the GPU when its time ends is deleted after the copy."""
    core = make_core(tiers=[disk()])
    ctx = RequestContext("a", hints=RequestHints(ttl_s=1.0))
    grant = core.manager.prepare_store([(KEYS[0], 0)], ctx)
    assert grant is not None
    core.manager.complete_store(grant.slots)
    core.finish_all()
    load = core.manager.prepare_load(KEYS[:1], ctx)
    core.begin(2.0)
    core.manager.take_ops()
    assert core.host.slots.get(KEYS[0]) is not None
    core.manager.complete_load(load.slots)
    core.begin(3.0)
    core.finish_all()
    core.begin(4.0)
    assert core.host.slots.get(KEYS[0]) is None
    assert not core.lower[0].residency.rows.has_bytes_of(KEYS[0])
    core.manager.validate()
