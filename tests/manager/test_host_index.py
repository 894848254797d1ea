"""Slots and chunks of the host tier, against a model that is obviously right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.errors import InvariantError
from tierkv.manager.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host_index import Chunk, HostIndex
from tierkv.policies.lru import LruPolicy
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

SLOTS = 4
keys = st.sampled_from([Key(bytes([letter])) for letter in b"abcdefg"])
picks = st.integers(0, 50)


class HostMachine(RuleBasedStateMachine):
    """Every history of admissions, I/O, holds and drops.

    The model: lists of chunks that I/O fills, and a list of holds taken; a slot may only come back when neither names
    its chunk any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = HostIndex(SLOTS, LruPolicy())
        self.filling: list[Chunk] = []
        self.holds: list[Chunk] = []
        self.leases: dict[SlotRef, Chunk] = {}

    def pick(self, chunks: list[Chunk], number: int) -> Chunk:
        return chunks[number % len(chunks)]

    @rule(key=keys, promoting=st.booleans())
    def admit(self, key: Key, promoting: bool) -> None:
        if self.host.get(key) is not None or not self.host.room:
            return
        before = {chunk.key for chunk in self.host.visible()}
        chunk, evicted = self.host.admit(key, 10, ChunkState.PROMOTING if promoting else ChunkState.STORING)
        after = {chunk.key for chunk in self.host.visible()}
        assert after == (before | {key}) - ({evicted} if evicted is not None else set())
        assert chunk.ref not in self.leases, "a lease is never given out twice"
        self.leases[chunk.ref] = chunk
        self.filling.append(chunk)

    @precondition(lambda self: self.filling)
    @rule(number=picks, well=st.booleans())
    def fill(self, number: int, well: bool) -> None:
        chunk = self.pick(self.filling, number)
        self.filling.remove(chunk)
        visible = self.host.get(chunk.key) is chunk
        good = ChunkEvent.STORED if chunk.state is ChunkState.STORING else ChunkEvent.ARRIVED
        assert self.host.settle(chunk, good if well else ChunkEvent.FAILED) == (visible and well)
        self.host.release(chunk)

    @rule(key=keys)
    def hold(self, key: Key) -> None:
        chunk = self.host.get(key)
        if chunk is not None:
            self.host.hold(chunk)
            self.holds.append(chunk)

    @precondition(lambda self: self.holds)
    @rule(number=picks)
    def release(self, number: int) -> None:
        chunk = self.pick(self.holds, number)
        self.holds.remove(chunk)
        self.host.release(chunk)

    @rule(key=keys)
    def drop(self, key: Key) -> None:
        chunk = self.host.get(key)
        if chunk is not None:
            self.host.drop(chunk)
            assert self.host.get(key) is None

    @rule(touched=st.lists(keys))
    def touch(self, touched: list[Key]) -> None:
        self.host.touch(touched)

    @invariant()
    def busy_slots_stay_taken(self) -> None:
        self.host.validate()
        busy = {id(chunk) for chunk in (*self.filling, *self.holds)}
        for ref, chunk in self.leases.items():
            owner = self.host.owner(ref)
            assert owner is chunk or owner is None
            if id(chunk) in busy:
                assert owner is chunk, "its slot was given away under running I/O"
                assert chunk.holders == self.holds.count(chunk) + self.filling.count(chunk)
        evictable = [c for c in self.host.visible() if c.state is ChunkState.READY and id(c) not in busy]
        owned = [ref for ref in self.leases if self.host.owner(ref) is not None]
        assert self.host.room == SLOTS - len(owned) + len(evictable)

    def teardown(self) -> None:
        """All I/O ends and everybody lets go: every slot can be had."""
        while self.filling:
            self.fill(0, well=False)
        while self.holds:
            self.release(0)
        assert self.host.room == SLOTS
        self.host.validate()


TestHostIndex = HostMachine.TestCase


def chunk_of(host: HostIndex, key: bytes = b"k") -> Chunk:
    """A readable chunk that nobody holds."""
    chunk, _ = host.admit(Key(key), 10, ChunkState.STORING)
    host.settle(chunk, ChunkEvent.STORED)
    host.release(chunk)
    return chunk


def test_released_more_often_than_held() -> None:
    """A release too many is a bug that would free a slot under somebody; it is told with the chunk's story."""
    host = HostIndex(2, LruPolicy())
    chunk = chunk_of(host)
    with pytest.raises(InvariantError, match="admitted -> storing; stored -> ready"):
        host.release(chunk)


def test_admitted_without_room() -> None:
    """The caller looks at ``room`` first; who does not is told so instead of getting somebody's slot."""
    host = HostIndex(1, LruPolicy())
    host.hold(chunk_of(host))
    with pytest.raises(InvariantError, match="without room"):
        host.admit(Key(b"other"), 10, ChunkState.STORING)


def _free_twice(host: HostIndex, _: Chunk) -> None:
    host._free[0] = host._free[1]


def _lost_slot(host: HostIndex, _: Chunk) -> None:
    host._free.pop()


def _nobody_holds(host: HostIndex, chunk: Chunk) -> None:
    host.admit(Key(b"new"), 10, ChunkState.STORING)[0].holders = 0
    assert chunk.holders == 0


def _policy_forgot(host: HostIndex, chunk: Chunk) -> None:
    host._policy.remove(chunk.key)


def _invisible(host: HostIndex, chunk: Chunk) -> None:
    del host._by_key[chunk.key]


@pytest.mark.parametrize("breakage", [_free_twice, _lost_slot, _nobody_holds, _policy_forgot, _invisible])
def test_validate_sees_what_is_broken(breakage: Callable[[HostIndex, Chunk], None]) -> None:
    """Each invariant is broken once on purpose: a validate() that sees nothing proves nothing."""
    host = HostIndex(4, LruPolicy())
    chunk = chunk_of(host)
    host.validate()
    breakage(host, chunk)
    with pytest.raises(InvariantError):
        host.validate()


def test_the_story_is_bounded() -> None:
    """What is remembered to explain an error does not grow with the uptime."""
    host = HostIndex(1, LruPolicy())
    for i in range(5000):
        chunk_of(host, b"%d" % i)
    assert len(host._story) == 4096
    assert host.story(Key(b"0")) == "nothing remembered"
    assert host.story(Key(b"4999")) == "admitted -> storing; stored -> ready"
