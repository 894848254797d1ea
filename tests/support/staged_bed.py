"""Engine that schedules itself, reduced to its questions: it asks about a request's chunks until no answer defers.

Written from the rules of such engines, not from the code of tierkv: a prefix is scanned until the first miss; a window
from its end until enough consecutive chunks are present; a group that shortens the hit makes it ask the others again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from core_parts import Core

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING, LookupResult.RETRY


def prefix(count: int, family: str = "a", group: int = 0) -> tuple[Key, ...]:
    """First ``count`` chunks of a prompt."""
    return tuple(make_key(f"{family} {i}".encode().rjust(12), group) for i in range(count))


class StagedBed:
    """Lookups over a scripted core.

    Args:
        core: with a tier or several that complete only what the test lets them.
        deadline_s: of lookups.
        waits_whole: whether the engine uses no part of a prefix that it waits for.
        rate: prompt tokens that the engine computes per second; None: it does not say.
    """

    def __init__(
        self, core: Core, deadline_s: float = 5.0, *, waits_whole: bool = True, rate: float | None = None
    ) -> None:
        self.core = core
        limits = SchedulerLimits(lookup_deadline_s=deadline_s, weighs_recompute=True, prefill_tokens_per_s=rate)
        self.lookups = StagedLookups(core.manager, core.geometry, limits, core.counters, waits_whole=waits_whole)
        self.now = 0.0
        self.asked: Counter[Key] = Counter()
        self.begin()

    def begin(self, seconds: float = 0.0) -> None:
        """Begin a step, some seconds after the previous one."""
        self.now += seconds
        self.core.manager.begin_step(self.now)
        self.lookups.begin_step(self.now)

    def end(self) -> None:
        """End the questions of a step, and check all invariants."""
        self.lookups.end_step()
        self.lookups.validate()
        self.core.manager.validate()

    def add(self, request_id: str, **hints: object) -> None:
        """Register a request."""
        read = RequestHints(**hints)  # type: ignore[arg-type]  # field names are checked at run time
        self.lookups.add_request(RequestContext(request_id, hints=read))

    def look(self, request_id: str, key: Key, number: int) -> LookupResult:
        """Ask about the chunk of that number in its group."""
        self.asked[key] += 1
        group = int.from_bytes(key[-4:], "big")
        tokens = self.core.geometry.groups[group].chunk_tokens
        return self.lookups.lookup(request_id, key, group, (number + 1) * tokens)

    def ask(self, request_id: str, keys: Sequence[Key], start: int = 0) -> int | None:
        """Number of present chunks from ``start`` on, as a prefix; None: deferred."""
        hits, later = 0, False
        for number, key in enumerate(keys[start:], start):
            answer = self.look(request_id, key, number)
            if answer is MISS:
                break
            later |= answer is not HIT
            hits += answer is not RETRY
        return None if later else hits

    def ask_window(self, request_id: str, keys: Sequence[Key], window: int) -> int | None:
        """End of the last run of ``window`` chunks, or of the first chunks' run if there is none."""
        run, later, in_run = 0, False, False
        for number in range(len(keys) - 1, -1, -1):
            answer = self.look(request_id, keys[number], number)
            if answer is MISS or answer is RETRY:
                run, in_run = 0, False
                later |= answer is RETRY
            else:
                run += 1
                in_run |= answer is PENDING
            if run == window:
                return None if later or in_run else number + window
        return None if later or in_run else run

    def ask_both(self, request_id: str, whole: Sequence[Key], windowed: Sequence[Key], window: int) -> int | None:
        """Longest end that both groups have; None: deferred."""
        end = len(whole)
        while end:
            first = self.ask(request_id, whole[:end])
            later = first is None
            if first is not None:
                end = min(end, first)
            if not end:
                return 0
            second = self.ask_window(request_id, windowed[:end], window)
            if second is None:
                return None
            if second == end:
                return None if later else end
            end = second
        return 0

    def answer(self, request_id: str, keys: Sequence[Key], steps_max: int = 20) -> int:
        """Ask step after step, with all I/O done in between, until the answer is known."""
        for _ in range(steps_max):
            self.begin(0.01)
            answer = self.ask(request_id, keys)
            self.end()
            if answer is not None:
                return answer
            self.run_io()
        raise AssertionError(f"{request_id} is still deferred after {steps_max} steps")

    def run_io(self, kind: OutcomeKind = OutcomeKind.OK) -> list[Key]:
        """Complete the instructions of the manager. Returns the chunks that were read, written or probed."""
        return [key for op in self.core.finish_all(kind) for key in op.keys]

    def load(self, request_id: str, keys: Sequence[Key]) -> None:
        """Load the answered chunks, and end the load."""
        ctx = self.lookups.request_context(request_id)
        grant = self.core.manager.prepare_load(keys, ctx)
        self.lookups.close_lookup(request_id)
        self.core.manager.complete_load(grant.slots)

    @property
    def held(self) -> int:
        """Chunks of the host tier that cannot be evicted."""
        return self.core.host.num_slots - self.core.host.room
