"""Cache events on their way to observers (the hook ``tierkv_observe``), off the engine's thread and under a bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from tierkv.types.cache_events import CacheEvent

_log = logging.getLogger(__name__)

PENDING_BATCHES_MAX = 64
"""Batches that may wait for slow observers; more are dropped and counted."""


class Observers:
    """Calls observers in order, elsewhere.

    Args:
        call: hands one batch to every observer; None if there is none.
        submit: runs a function on a framework thread, in order of submission.
    """

    def __init__(
        self,
        call: Callable[[Sequence[CacheEvent]], object] | None,
        submit: Callable[[Callable[[], None]], Future[None]] | None,
        pending_max: int = PENDING_BATCHES_MAX,
    ) -> None:
        self.dropped_batches = 0
        self.failed_batches = 0
        self._call = call
        self._submit = submit
        self._pending_max = pending_max
        self._pending: list[Future[None]] = []

    @property
    def any(self) -> bool:
        """Whether somebody observes."""
        return self._call is not None

    def notify(self, events: Sequence[CacheEvent]) -> None:
        """Pass a batch on; never waits. Engine's thread."""
        if self._call is None or self._submit is None or not events:
            return
        self._pending = [future for future in self._pending if not future.done()]
        if len(self._pending) >= self._pending_max:
            self.dropped_batches += 1
            return
        batch = tuple(events)
        self._pending.append(self._submit(lambda: self._deliver(batch)))

    def finish(self, timeout_s: float) -> None:
        """Wait, within a bound, until observers have heard everything. For an orderly end."""
        wait(self._pending, timeout_s)

    def _deliver(self, batch: Sequence[CacheEvent]) -> None:
        try:
            if self._call is not None:
                self._call(batch)
        except Exception:  # noqa: BLE001 - see below
            # An observer is somebody else's code; its fault is counted and stays its own (hook contract).
            self.failed_batches += 1
            _log.exception("an observer of cache events failed")
