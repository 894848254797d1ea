"""Transfers of an engine that names them by their chunks: what the end of one costs on the engine's thread."""

from __future__ import annotations

from calls import calls_of

from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.types.keys import make_key
from tierkv.types.transfers import SlotRef, StagedTransfer
from tierkv.worker.completion_flags import CompletionFlags


def calls_of_an_end(chunks: int) -> int:
    """Calls of the report that a store of that many chunks has ended."""
    flags = CompletionFlags(num_workers=1)
    jobs, number = StagedJobs(flags), flags.allocate(is_store=True)
    keys = tuple(make_key(b"%016d" % chunk, 0) for chunk in range(chunks))
    slots = tuple(SlotRef(chunk, 1) for chunk in range(chunks))
    jobs.begin_store(StagedTransfer(number, keys, (0,) * chunks, slots))
    calls = calls_of(jobs.note_ended, keys)
    assert [job.keys for job, _ in jobs.take_ended()] == [keys]
    assert not jobs.in_flight
    flags.close()
    return calls


def test_the_end_of_a_store_takes_no_call_per_chunk() -> None:
    """An engine reports a store by its chunks, in a step in which requests wait for their next token."""
    assert calls_of_an_end(64) == calls_of_an_end(1) <= 16
