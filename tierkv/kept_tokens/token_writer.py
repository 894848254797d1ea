"""Writer of kept tokens: on a thread of its own, bounded in memory. The engine never waits for it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence

from tierkv.dispatch.threads.batch_writer import BatchWriter
from tierkv.dispatch.threads.spawn import Spawn, start_thread
from tierkv.kept_tokens.packing import pack_snapshot
from tierkv.kept_tokens.token_file import Row, TokenFile
from tierkv.logs.definitions import TOKENS_NOT_KEPT
from tierkv.logs.stack_log import StackLog
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.keys import Key

CHANGES_MAX = 16_384
"""Changes at most that wait for a slow disk: about 20 MiB for chunks of 256 tokens."""

BATCHES_PER_COMMIT = 64
"""Steps whose changes are written at once, where they wait."""


Change = tuple[Key, Snapshot | None]
"""A chunk and its snapshot; None: to be deleted."""


class TokenWriter:
    """Changes of kept tokens, written in batches: a ``TokenKeeper``.

    Args:
        file: open file. The writer's thread alone uses it from now on, and closes it.
        counters: for metrics.
        log: log of the stack.
        clock, engine_sleep: for :meth:`close`.
        changes_max: changes at most that wait.
        spawn: starts the thread.
    """

    is_kept = True

    def __init__(  # noqa: PLR0913 - three are doors for tests
        self,
        file: TokenFile,
        counters: CoreCounters,
        log: StackLog,
        *,
        clock: Callable[[], float],
        engine_sleep: Callable[[float], None],
        changes_max: int = CHANGES_MAX,
        spawn: Spawn = start_thread,
    ) -> None:
        self._file = file
        self._counters = counters
        self._log = log
        self._changes: list[Change] = []
        self._failed = self._counted = 0
        self._writer: BatchWriter[Change] = BatchWriter(
            "tierkv-tokens",
            self._write,
            file.close,
            items_max=changes_max,
            clock=clock,
            engine_sleep=engine_sleep,
            batches_at_once=BATCHES_PER_COMMIT,
            spawn=spawn,
        )

    # -- engine's thread ---------------------------------------------------------------------------------------------

    def keep(self, key: Key, snapshot: Snapshot) -> None:
        """Keep the snapshot of a chunk. Written after :meth:`hand_over`."""
        self._changes.append((key, snapshot))

    def forget(self, key: Key) -> None:
        """Delete the snapshot of a chunk that no tier holds any more."""
        self._changes.append((key, None))

    def hand_over(self) -> None:
        """Pass the changes to the thread without waiting. Beyond the bound they are dropped, and counted."""
        if self._failed != self._counted:
            self._counters.tokens_not_kept += self._failed - self._counted
            self._counted = self._failed
        changes = self._changes
        if not changes:
            return
        self._changes = []
        if not self._writer.put(changes):
            self._counters.tokens_not_kept += _kept_in(changes)

    def close(self, timeout_s: float) -> None:
        """Write pending changes, within ``timeout_s``. Idempotent."""
        self.hand_over()
        self._writer.close(timeout_s)
        self.hand_over()

    # -- the writer's thread -----------------------------------------------------------------------------------------

    def _write(self, changes: Sequence[Change]) -> None:
        rows = list(self._rows(changes))
        try:
            self._file.apply(rows)
        except sqlite3.Error as error:
            self._not_kept(sum(row is not None for _, row in rows), error)

    def _rows(self, changes: Sequence[Change]) -> Iterator[Row]:
        for key, snapshot in changes:
            try:
                yield key, None if snapshot is None else pack_snapshot(snapshot)
            except ValueError as error:
                self._not_kept(1, error)

    def _not_kept(self, count: int, reason: Exception) -> None:
        self._failed += count
        self._log.report(TOKENS_NOT_KEPT, reason=reason)


def _kept_in(changes: list[Change]) -> int:
    return sum(snapshot is not None for _, snapshot in changes)
