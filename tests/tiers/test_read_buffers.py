"""Reads from a backend that writes to its buffers after the call: no slot changes, and no other read is disturbed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from plain_files import AsyncPlainFiles, PlainFiles
from tier_bench import Bench, compressible, read_chunks, write_chunks

from tierkv.abc import ReadRequest, ReadResult
from tierkv.errors import CorruptFrameError
from tierkv.memory.arena import Bytes
from tierkv.testing.frames import make_key
from tierkv.tiers.read_buffers import ReadBuffers
from tierkv.types.tier_ops import OutcomeKind, Verb

KEYS = [make_key(number) for number in range(4)]


class LateWriter:
    """Keeps the buffers of reads, as a thread of a library would, and writes to them on demand."""

    def __init__(self, files: PlainFiles) -> None:
        self.files = files
        self.kept: list[Bytes] = []

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read, and keep the buffers."""
        self.kept += [np.frombuffer(request.buffer, np.uint8) for request in requests]
        return self.files.read_into(requests)

    def write_late(self) -> None:
        """Write to every buffer that was ever given."""
        for buffer in self.kept:
            buffer[:] = 0x66


def bench_with_chunks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> LateWriter:
    """Store chunks 0 to 3; reads go to a late writer from now on."""
    write_chunks(bench.tier(), KEYS, [bench.fill(slot, key, compressible(slot)) for slot, key in enumerate(KEYS)])
    assert isinstance(bench.files, PlainFiles)
    late = LateWriter(bench.files)
    monkeypatch.setattr(bench.backend, "read_into", late.read_into)
    return late


def test_a_late_write_changes_no_slot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunk is READY, and may be copied to the GPU at that moment. Later reads must not be disturbed either."""
    late = bench_with_chunks(bench, monkeypatch)
    tier = bench.tier(own_buffers=True)
    with caplog.at_level(logging.WARNING, "tierkv"):
        for number, key in enumerate(KEYS):
            (outcome,) = read_chunks(tier, [key], bench.stale([4 + number]))
            late.write_late()
            assert outcome.kind is OutcomeKind.OK
    assert [bench.payload(4 + number, key) for number, key in enumerate(KEYS)] == [*map(compressible, range(4))]
    assert len(late.kept) == 4
    (record,) = caplog.records
    assert "event=buffer_kept tier=files" in record.getMessage()


def test_into_slots_a_late_write_goes_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of ``own_buffers = false`` with such a backend: the test above can fail."""
    late = bench_with_chunks(bench, monkeypatch)
    (outcome,) = read_chunks(bench.tier(own_buffers=False), KEYS[:1], bench.stale([4]))
    assert outcome.kind is OutcomeKind.OK
    late.write_late()
    with pytest.raises(CorruptFrameError):
        bench.payload(4, KEYS[0])


def test_every_result_is_as_without_own_buffers(bench: Bench) -> None:
    """Absent, damaged and whole frames of one batch, and a slot that is not touched by a miss."""
    write_chunks(bench.tier(), KEYS[:2], [bench.fill(slot, KEYS[slot], compressible(slot)) for slot in range(2)])
    content = bytearray(bench.file(KEYS[1]).read_bytes())
    content[5000] ^= 1
    bench.file(KEYS[1]).write_bytes(content)
    outcomes = read_chunks(bench.tier(own_buffers=True), KEYS[:3], bench.stale([4, 5, 6]))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.OK, OutcomeKind.CORRUPT, OutcomeKind.ABSENT]
    assert bench.payload(4, KEYS[0]) == compressible(0)
    assert bytes(bench.arena.slot(6)) == b"\x5a" * bench.arena.slot_bytes


def test_a_cancelled_read_never_reaches_a_slot(async_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread behind a cancelled coroutine fills the buffer later: it must belong to no slot and to no other read."""
    bench, given, begun = async_bench, list[Bytes](), asyncio.Event()

    async def hang(requests: Sequence[ReadRequest]) -> list[ReadResult]:
        given.extend(np.frombuffer(request.buffer, np.uint8) for request in requests)
        begun.set()
        await asyncio.Event().wait()
        return []

    assert isinstance(bench.files, AsyncPlainFiles)
    monkeypatch.setattr(bench.files, "read_into", hang)
    tier = bench.tier(asynchronous=True, own_buffers=True)
    slots = bench.stale([4])

    async def cancelled() -> None:
        task = asyncio.create_task(tier.perform_async(Verb.READ, KEYS[:1], slots))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    given[0][:] = 0x66
    assert bytes(bench.arena.slot(4)) == b"\x5a" * bench.arena.slot_bytes


def test_a_buffer_is_used_again_when_no_view_of_it_is_left() -> None:
    """Fresh memory is slow; kept memory would be written to by two."""
    pool = ReadBuffers(8192)
    first = pool.take()
    first.view[:4] = b"mark"
    assert pool.release(first)
    second = pool.take()
    assert bytes(second.view[:4]) == b"mark"
    kept = second.view[4096:]
    assert not pool.release(second)
    kept[:4] = b"late"
    assert bytes(pool.take().view[4096:4100]) == bytes(4)
