"""An engine that schedules itself, reduced to its questions: it goes over a request's chunks until nobody says "later".

Written from the rules that such engines follow, not from ours: a prefix is scanned until the first miss; a window from
its end until enough chunks in a row are there; a group that shortens the hit makes the others be asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from core_parts import Core

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind

HIT, MISS, PENDING, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.PENDING, LookupResult.RETRY


def prefix(count: int, family: str = "a", group: int = 0) -> tuple[Key, ...]:
    """The first ``count`` chunks of a prompt."""
    return tuple(make_key(f"{family} {i}".encode().rjust(12), group) for i in range(count))


class StagedBed:
    """Lookups over a scripted core.

    Args:
        core: with a tier or several that complete only what the test lets them.
        deadline_s: of lookups.
    """

    def __init__(self, core: Core, deadline_s: float = 5.0) -> None:
        self.core = core
        self.lookups = StagedLookups(core.manager, core.geometry, deadline_s, core.counters)
        self.now = 0.0
        self.asked: Counter[Key] = Counter()
        self.begin()

    def begin(self, seconds: float = 0.0) -> None:
        """A step begins so much later than the last one."""
        self.now += seconds
        self.core.manager.begin_step(self.now)
        self.lookups.begin_step(self.now)

    def end(self) -> None:
        """The engine has asked what it wanted, and everything that must hold does."""
        self.lookups.end_step()
        self.lookups.validate()
        self.core.manager.validate()

    def add(self, request_id: str, **hints: object) -> None:
        """A request arrives."""
        read = RequestHints(**hints)  # type: ignore[arg-type]  # field names are checked at run time
        self.lookups.add_request(RequestContext(request_id, hints=read))

    def look(self, request_id: str, key: Key, number: int) -> LookupResult:
        """One question, about the chunk of that number in its group."""
        self.asked[key] += 1
        group = int.from_bytes(key[-4:], "big")
        tokens = self.core.geometry.groups[group].chunk_tokens
        return self.lookups.lookup(request_id, key, group, (number + 1) * tokens)

    def ask(self, request_id: str, keys: Sequence[Key], start: int = 0) -> int | None:
        """How many chunks from ``start`` on are there, as a prefix; None: later."""
        hits, later = 0, False
        for number, key in enumerate(keys[start:], start):
            answer = self.look(request_id, key, number)
            if answer is MISS:
                break
            later |= answer is not HIT
            hits += answer is not RETRY
        return None if later else hits

    def ask_window(self, request_id: str, keys: Sequence[Key], window: int) -> int | None:
        """Where the last run of ``window`` chunks ends, or how long the first chunks' run is if there is none."""
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
        """The longest end that both groups have; None: later."""
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
        """Ask in step after step, all I/O done in between, until it is known."""
        for _ in range(steps_max):
            self.begin(0.01)
            answer = self.ask(request_id, keys)
            self.end()
            if answer is not None:
                return answer
            self.run_io()
        raise AssertionError(f"{request_id} is still deferred after {steps_max} steps")

    def run_io(self, kind: OutcomeKind = OutcomeKind.OK) -> list[Key]:
        """Complete what the manager instructs. Returns the chunks that were read, written or asked for."""
        return [key for op in self.core.finish_all(kind) for key in op.keys]

    def load(self, request_id: str, keys: Sequence[Key]) -> None:
        """What was answered is loaded, and the load ends."""
        ctx = self.lookups.request_context(request_id)
        grant = self.core.manager.prepare_load(keys, ctx)
        self.lookups.close_lookup(request_id)
        self.core.manager.complete_load(grant.slots)

    @property
    def held(self) -> int:
        """Chunks of the host tier that cannot be evicted."""
        return self.core.host.num_slots - self.core.host.room
