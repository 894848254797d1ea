"""Interfaces between a worker and its copies, which run on the host's cores or on a GPU's copy engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tierkv.errors import CorruptFrameError
from tierkv.logs.definitions import CHUNK_NOT_COPIED, CHUNK_REFUSED
from tierkv.logs.stack_log import StackLog
from tierkv.memory.arena import Bytes
from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of a transfer."""

    failed: frozenset[Key]
    """Keys that could not be copied."""
    checksums: tuple[bytes, ...] = ()
    """For a store by one of several workers: checksum of its part of each chunk; empty bytes after a failure."""
    seconds: float | None = None
    """Duration of the copy. None: not measured; the worker then uses the time until it observes the end."""


Submit = Callable[[Callable[[], Any]], "Future[Any]"]
"""Runs a function on another thread. Returns a future of its result, without waiting."""


Wait = Callable[[Collection["Future[Any]"]], object]
"""Waits until futures of ``Submit`` are done."""


class Transfer(Protocol):
    """Job under way. All methods belong to the worker's thread."""

    def done(self) -> bool:
        """Whether it has ended. Does not wait."""

    def wait(self) -> None:
        """Wait until it has ended."""

    def result(self) -> CopyResult:
        """Return its result. Call only after its end. Never raises."""


class Copies(Protocol):
    """Starts transfers between registered pages and slots."""

    def start(self, job: TransferJob) -> Transfer:
        """Begin a job. Never waits."""

    def close(self) -> None:
        """Release device resources. No transfer may be under way. Idempotent."""


class Pages(Protocol):
    """KV tensors of one worker, as pages that are gathered into a slot's part and scattered from it.

    A part holds, for each tensor of the group in turn, the pages of all its blocks. May be used on several threads.
    """

    def gather(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy blocks into a part. Its first ``skip`` blocks, and those behind the last given one, become zeros."""

    def scatter(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy a part to blocks, except its first ``skip`` blocks and those behind the last given one."""

    def check_ids(self, group: int, block_ids: Sequence[int]) -> None:
        """Check that block ids exist.

        Raises:
            EngineProtocolError: one does not.
        """


def log_failure(log: StackLog, key: Key, error: Exception) -> None:
    """Report the failed copy of a chunk. The traceback of an error that is no damage is shown to debuggers."""
    if isinstance(error, CorruptFrameError):
        log.report(CHUNK_REFUSED, key=key.hex(), reason=error)
    else:
        log.report(CHUNK_NOT_COPIED, key=key.hex(), reason=f"{type(error).__name__}: {error}")
        _log.debug("chunk %s could not be copied", key.hex(), exc_info=error)
