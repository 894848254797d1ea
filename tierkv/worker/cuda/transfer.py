"""Transfer of a GPU: each piece of the job is enqueued by a copy thread, copied by the GPU, completed by a copy thread.

A piece is on its own: its checksums are computed as soon as its copies have ended, while others are still on their way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob
from tierkv.worker.cuda.runtime import Event
from tierkv.worker.transfers import CopyResult

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Enqueued:
    """State of a piece on the GPU's streams."""

    failed: set[Key] = field(default_factory=set)
    """Keys that could not be enqueued."""
    began: Event | None = None
    """Point before the first copy."""
    events: list[Event] = field(default_factory=list)
    """Point behind each batch."""
    held: list[Any] = field(default_factory=list)
    """Views that keep the arena mapped while the copy engine may use it."""


Finish = Callable[[range, frozenset[Key]], "Future[CopyResult]"]
"""Completes a piece (the numbers of its chunks, those that failed) whose copies have ended."""


class CudaTransfer:
    """Job under way.

    Args:
        job: the job.
        pieces: numbers of the chunks of each piece, and what a copy thread enqueued for it.
        finish: completes a piece.
    """

    def __init__(self, job: TransferJob, pieces: Sequence[tuple[range, Future[Enqueued]]], finish: Finish) -> None:
        self._pieces = [_Piece(job, numbers, enqueued, finish) for numbers, enqueued in pieces]
        self._ended = 0

    def done(self) -> bool:
        """Whether it has ended. Starts the completion of pieces that the GPU has copied. Does not wait.

        Pieces end nearly in order, so it looks no further than the first one that is on its way: the engine's thread
        asks in every step.
        """
        for piece in self._pieces[self._ended :]:
            if not piece.advance(block=False):
                break
        while self._ended < len(self._pieces) and self._pieces[self._ended].has_ended():
            self._ended += 1
        return self._ended == len(self._pieces)

    def wait(self) -> None:
        """Wait until it has ended."""
        for piece in self._pieces:
            piece.advance(block=True)
        for piece in self._pieces:
            piece.wait()

    def result(self) -> CopyResult:
        """Return its result. Every key of a piece that could not run has failed."""
        results = [piece.result() for piece in self._pieces]
        failed = frozenset[Key]().union(*(result.failed for result in results))
        checksums = tuple(digest for result in results for digest in result.checksums)
        return CopyResult(failed, checksums, self._seconds())

    def _seconds(self) -> float | None:
        """Seconds from the begin of the first copy to the end of the last, on the GPU's clock."""
        ends = [piece.last for piece in self._pieces if piece.last is not None]
        began = next((piece.began for piece in self._pieces if piece.began is not None), None)
        if began is None or not ends:
            return None
        try:
            return max(began.elapsed_time(end) for end in ends) / 1000
        except RuntimeError:  # the GPU's context is lost
            return None


class _Piece:
    """Some chunks of a job.

    Attributes:
        began: point before its first copy, after its copies have ended.
        last: point behind its last copy.
    """

    def __init__(self, job: TransferJob, numbers: range, enqueued: Future[Enqueued], finish: Finish) -> None:
        self._job = job
        self._numbers = numbers
        self._enqueued = enqueued
        self._finish = finish
        self._finished: Future[CopyResult] | None = None
        self.began: Event | None = None
        self.last: Event | None = None

    def advance(self, *, block: bool) -> bool:
        """Start the completion if the GPU's last copy has ended, or, with ``block``, when it has. Whether it has."""
        if self._finished is not None:
            return True
        if block:
            wait((self._enqueued,))
        elif not self._enqueued.done():
            return False
        failed = self._keys()
        if not self._enqueued.cancelled() and self._enqueued.exception() is None:
            enqueued = self._enqueued.result()
            try:
                for event in enqueued.events:
                    if block:
                        event.synchronize()
                    elif not event.query():
                        return False
                failed = frozenset(enqueued.failed)
                self.began, self.last = enqueued.began, enqueued.events[-1] if enqueued.events else None
            except RuntimeError:  # the GPU's context is lost: it will copy nothing more
                _log.exception("the GPU failed in transfer %d", self._job.job_id)
            enqueued.held.clear()
        self._finished = self._finish(self._numbers, failed)
        return True

    def has_ended(self) -> bool:
        """Whether it is complete."""
        return self._finished is not None and self._finished.done()

    def wait(self) -> None:
        """Wait for its completion, which has started."""
        if self._finished is not None:
            wait((self._finished,))

    def result(self) -> CopyResult:
        """Return the keys that failed, and the checksums. Every key of a piece that could not run has failed."""
        finished = self._finished
        if finished is None or finished.cancelled() or finished.exception() is not None:
            return CopyResult(self._keys(), (b"",) * len(self._numbers) if self._job.is_store else ())
        return finished.result()

    def _keys(self) -> frozenset[Key]:
        return frozenset(self._job.keys[self._numbers.start : self._numbers.stop])
