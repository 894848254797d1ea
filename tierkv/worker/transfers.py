"""What a worker needs of those who copy for it: on the host's cores, or on a GPU's copy engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tierkv.memory.arena import Bytes
from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a transfer ended.

    failed: keys that could not be copied.
    seconds: how long the copy itself took; None: not measured, the worker takes the time until it sees the end.
    checksums: of a store of one worker among several, per chunk of the job: of the worker's part; empty bytes: failed.
    """

    failed: frozenset[Key]
    checksums: tuple[bytes, ...] = ()
    seconds: float | None = None


Submit = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a function somewhere else, without waiting, and gives a future of its result."""


Wait = Callable[[Collection["Future[Any]"]], object]
"""Waits until futures that ``Submit`` gave are done."""


class Transfer(Protocol):
    """A job under way. All methods belong to the worker's thread."""

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""

    def wait(self) -> None:
        """Until it has ended."""

    def result(self) -> CopyResult:
        """Once it has ended: how. Never raises."""


class Copies(Protocol):
    """Starts transfers between registered pages and slots."""

    def start(self, job: TransferJob) -> Transfer:
        """Begin a job. Does not wait for anything."""

    def close(self) -> None:
        """Give back what was taken from the device; no transfer is under way. Idempotent."""


class Pages(Protocol):
    """One worker's KV tensors, as pages that can be gathered into a slot's part, and scattered from one.

    A part holds, for each tensor of the group in turn, the pages of all its blocks. May be used on several threads.
    """

    def gather(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy blocks into a part. Its first ``skip`` blocks, and those behind the last one given, become zeros."""

    def scatter(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy a part to blocks, leaving out its first ``skip`` blocks and what is behind the last one."""

    def check_ids(self, group: int, block_ids: Sequence[int]) -> None:
        """Make sure that block ids exist.

        Raises:
            EngineProtocolError: one does not.
        """


def failed_result(job: TransferJob) -> CopyResult:
    """Of a transfer that could not run at all."""
    return CopyResult(frozenset(job.keys), (b"",) * len(job.keys) if job.is_store else ())
