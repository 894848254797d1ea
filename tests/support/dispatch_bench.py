"""Dispatcher over real files with a clock that the test moves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tier_bench import Bench, compressible

from tierkv.dispatch import Dispatcher, TierLimits
from tierkv.testing.frames import make_key
from tierkv.testing.manual_clock import ManualClock
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import Completion, OutcomeKind, TierHealth, TierOp, TierReport, Verb, always
from tierkv.types.transfers import SlotRef

KEYS = [make_key(number) for number in range(64)]
PATIENCE_S = 60.0
"""Seconds that a test waits for a thread before it fails. No measure of speed."""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait for other threads."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s, f"{what} did not happen within {PATIENCE_S:g} seconds"
        time.sleep(0.001)


@dataclass
class DispatchBench:
    """Dispatcher with all its completions."""

    bench: Bench
    dispatcher: Dispatcher
    clock: ManualClock
    reports: list[TierReport] = field(default_factory=list)
    _op_ids: Iterator[int] = field(default_factory=itertools.count)

    def submit(
        self,
        verb: Verb,
        numbers: Sequence[int],
        slots: Sequence[int] = (),
        *,
        deadline_s: float = 10.0,
        tier: int = 0,
        is_wanted: Callable[[], bool] = always,
    ) -> int:
        """Submit an operation on ``KEYS[number]``. deadline_s: seconds from now."""
        op_id = next(self._op_ids)
        refs = tuple(SlotRef(slot, 1) for slot in slots)
        keys = tuple(KEYS[number] for number in numbers)
        self.dispatcher.submit(TierOp(op_id, tier, verb, keys, refs, deadline_s, is_wanted=is_wanted))
        return op_id

    def write(self, number: int, slot: int, **options: Any) -> int:
        """Store chunk ``number`` through a slot."""
        self.bench.fill(slot, KEYS[number], compressible(number))
        return self.submit(Verb.WRITE, [number], [slot], **options)

    def drain(self, limit: int = 1000) -> list[TierReport]:
        """Drain once, and record the completions."""
        reports = self.dispatcher.drain(limit)
        self.reports.extend(reports)
        return reports

    def completions(self, op_id: int) -> list[Completion]:
        """Return the completions of an operation so far."""
        return [report for report in self.reports if isinstance(report, Completion) and report.op_id == op_id]

    def health(self) -> list[bool]:
        """Return the health reports so far."""
        return [report.usable for report in self.reports if isinstance(report, TierHealth)]

    def kinds(self, op_id: int) -> list[OutcomeKind]:
        """Return the outcomes of the last completion of an operation."""
        return [outcome.kind for outcome in self.completions(op_id)[-1].outcomes]

    def wait(self, *op_ids: int) -> list[list[OutcomeKind]]:
        """Drain until these operations have ended; returns their outcomes."""

        def ended() -> bool:
            self.drain()
            return all(any(report.ended for report in self.completions(op_id)) for op_id in op_ids)

        wait_for(ended, f"the end of operations {op_ids}")
        return [self.kinds(op_id) for op_id in op_ids]

    def wait_health(self, *expected: bool) -> None:
        """Drain until the health reports are as expected."""

        def is_reported() -> bool:
            self.drain()
            return self.health() == list(expected)

        wait_for(is_reported, f"health {expected}, got {self.health()}")


@contextmanager
def dispatching(
    bench: Bench, *tiers: Tier, limits: TierLimits | None = None, **options: Any
) -> Iterator[DispatchBench]:
    """Open a dispatcher over the bench's tier, or over the given ones."""
    tiers = tiers or (bench.tier(),)
    options.setdefault("close_grace_s", 0.1)
    dispatcher = Dispatcher(tiers, [limits or TierLimits()] * len(tiers), bench.clock, **options)
    try:
        yield DispatchBench(bench, dispatcher, bench.clock)
    finally:
        dispatcher.close(PATIENCE_S)
