"""Delivery of cache events to observers (hook ``tierkv_observe``): off the engine's thread, and bounded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from tierkv.logs.definitions import OBSERVER_FAILED
from tierkv.logs.stack_log import StackLog
from tierkv.types.cache_events import CacheEvent

_log = logging.getLogger(__name__)

PENDING_BATCHES_MAX = 64
"""Pending batches at most, where observers are slow; further ones are dropped and logged."""


class Observers:
    """Queue of event batches for observers. They are called in order, on a framework thread.

    Args:
        call: passes one batch to every observer; None if there is none.
        submit: runs a function on a framework thread, in order of submission.
        log: log of the stack; one of its own if left out.
    """

    def __init__(
        self,
        call: Callable[[Sequence[CacheEvent]], object] | None,
        submit: Callable[[Callable[[], None]], Future[None]] | None,
        log: StackLog | None = None,
    ) -> None:
        self._log = log or StackLog()
        self._call = call
        self._submit = submit
        self._pending: list[Future[None]] = []

    @property
    def any(self) -> bool:
        """Whether there is an observer."""
        return self._call is not None

    def notify(self, events: Sequence[CacheEvent]) -> None:
        """Submit a batch without waiting. Engine's thread."""
        if self._call is None or self._submit is None or not events:
            return
        self._pending = [future for future in self._pending if not future.done()]
        if len(self._pending) >= PENDING_BATCHES_MAX:
            self._log.report(OBSERVER_FAILED, kind="slow", batches=1, reason=f"{PENDING_BATCHES_MAX} batches wait")
            return
        batch = tuple(events)
        self._pending.append(self._submit(lambda: self._deliver(batch)))

    def finish(self, timeout_s: float) -> None:
        """Wait, within ``timeout_s``, until observers have received all batches."""
        wait(self._pending, timeout_s)

    def _deliver(self, batch: Sequence[CacheEvent]) -> None:
        try:
            if self._call is not None:
                self._call(batch)
        except BaseException as error:  # noqa: BLE001 - see below
            # An observer is plugin code: its error is logged, and goes no further (hook contract).
            self._log.report(OBSERVER_FAILED, kind="failed", batches=1, reason=f"{type(error).__name__}: {error}")
            _log.debug("an observer of cache events failed", exc_info=True)
