"""Checks of answers under load: a deferral ends unless something moves, and a hit that is there is loaded in full.

The second one holds in steady scenarios only: there no tier fails, and none is late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from simulation.checks.failure import demand
from simulation.checks.probe import Probe
from simulation.checks.trace import Trace
from simulation.drawing.run_spec import RunSpec
from simulation.engine.expected_bytes import SimRequest
from simulation.engine.sequences import EngineSequence
from simulation.world.storage import Storage
from tierkv.scheduler.lookup.search import find_hit, tokens_covered
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

PROGRESS = "always progress"
IN_FULL = "a hit in healthy tiers is loaded in full"

PROGRESS_CLOCK = True
"""Whether a deadline counts only the time in which an operation is outstanding and nothing moves. Until the scheduler
has such a clock, a deferral must end within the deadline, and steady scenarios check no hits."""

GAP_MAX_S = 0.15
"""Longest time between two steps that counts as waiting; a longer one is the engine's silence."""

STILL_STEPS_MAX = 200
"""Steps within which something moves while requests wait, although no operation is outstanding."""

STILL_FACTOR = 2.0
"""Deadlines within which a deferral must end if nothing moves. The second one is for calls that the engine left out."""


ACCOUNT = "requests keep within their share of the slots"


@dataclass(slots=True)
class Question:
    """Question about a waiting request. there: its chunks that were in a tier ever since it was first asked.

    chunks_max: number of chunks that one request could hold at once, whenever it was asked. since_s: time of the first
    deferral after the latest answer. still_s: seconds since the first question after it in
    which an operation was outstanding and nothing moved.
    """

    chunks_max: int
    since_s: float | None = None
    there: set[Key] = field(default_factory=set)
    still_s: float = 0.0


class ServiceChecks:
    """Checks of the answers that waiting requests get."""

    def __init__(self, setup: RunSpec, probe: Probe, trace: Trace, storages: Mapping[str, Storage]) -> None:
        self._setup = setup
        self._probe = probe
        self._trace = trace
        self._storages = storages
        self._open: dict[str, Question] = {}
        self._held: dict[str, set[int]] = {}
        self._moved = False
        self._still_steps = 0
        self._expired = 0
        self._ended_by_loads = 0
        self._last_step_s = trace.clock()

    # -- questions -------------------------------------------------------------------------------------------------

    def moved(self) -> None:
        """Something moved that a lookup may wait for: an operation, a transfer or another request."""
        self._moved = True

    def asked(self, request_id: str) -> None:
        """A request is asked about."""
        chunks_max = self._probe.hold_chunks_max
        if request_id in self._open:
            self._open[request_id].chunks_max = min(self._open[request_id].chunks_max, chunks_max)
        else:
            self._open[request_id] = Question(chunks_max)
            if PROGRESS_CLOCK and self._setup.scenario.steady:
                self._open[request_id].there = self._there(self._keys(request_id))

    def forget(self, request_id: str) -> None:
        """A request waits for something else than a tier, or for nothing any more."""
        self._open.pop(request_id, None)

    def deferred(self, request_id: str) -> None:
        """A lookup is not answered: something must have moved within the deadline."""
        question, limit_s, now_s = self._open[request_id], self._setup.deadline_s, self._trace.clock()
        question.since_s = now_s if question.since_s is None else question.since_s
        if PROGRESS_CLOCK:
            still_s, limit_s = question.still_s, STILL_FACTOR * limit_s
        else:
            still_s = now_s - question.since_s
        what = f"{request_id} is deferred for {still_s:g} s"
        demand(still_s < limit_s, PROGRESS, f"{what}, the deadline is {self._setup.deadline_s:g} s")

    def answered(self, sequence: EngineSequence[SimRequest], local: int, answer: int, *, coming: bool) -> None:
        """A lookup is answered: in steady scenarios with everything that was there all the time.

        coming: whether a load of another request is in flight that brings one of its chunks. A lookup that has ended
        its wait for that one held all that it wanted, and waited for the engine's copies, not for a tier.
        """
        request_id = sequence.request.request_id
        question = self._open[request_id]
        question.since_s, question.still_s = None, 0.0
        self._moved = True
        if not (PROGRESS_CLOCK and self._setup.scenario.steady):
            return
        before, self._expired = self._expired, self._probe.manager.counters.deadlines_expired
        if coming and self._probe.waited_for_a_load_s(request_id) >= self._setup.deadline_s:
            self._ended_by_loads += self._expired - before
        there = self._there(question.there)
        groups, tokens_max = self._probe.search(request_id)
        if any(group.window_chunks is not None for group in groups):  # such a hit may be too long to be streamed
            tokens_max = tokens_covered(groups, local, tokens_max, question.chunks_max)
        hit = find_hit(groups, local, tokens_max, lambda key: LookupResult.HIT if key in there else LookupResult.MISS)
        what = f"{request_id} gets {answer} tokens beyond {local}, {hit.tokens} are there since its first question"
        demand(answer >= hit.tokens, IN_FULL, what)

    def _keys(self, request_id: str) -> set[Key]:
        """Chunks of a request."""
        groups, _ = self._probe.search(request_id)
        return {key for group in groups for key in group.keys}

    def _there(self, keys: set[Key]) -> set[Key]:
        """Those of ``keys`` that are in a tier, as far as the stack can know."""
        there = self._probe.readable(keys)
        for name in self._probe.tiers():
            stored = (keys & self._storages[name].frames.keys()) - there - self._probe.leaving(name)
            there |= self._probe.may_be_known(name, stored)
        return there

    # -- after every step ------------------------------------------------------------------------------------------

    def after_step(self, waiting: Collection[str], *, outstanding: bool) -> None:
        """Count the time of this step.

        Args:
            waiting: requests that were not admitted yet. An answer that the engine does not use is repeated.
            outstanding: whether a probe or read is in flight.
        """
        now_s = self._trace.clock()
        for request_id in [one for one in self._open if one not in waiting]:
            del self._open[request_id]
            self._moved = True
        # Operations that have ended wait for a step to take them in, with a small budget one in each: no tier is still.
        is_waiting = outstanding and not self._probe.manager.step.is_behind
        waited_s = min(GAP_MAX_S, now_s - self._last_step_s) if is_waiting else 0.0
        for question in self._open.values():
            question.still_s = 0.0 if self._moved else question.still_s + waited_s
            if question.there:
                question.there = self._there(question.there)
        self._still_steps = 0 if self._moved or not self._open else self._still_steps + 1
        self._moved, self._last_step_s = False, now_s
        if PROGRESS_CLOCK:
            still = f"{sorted(self._open)} wait, and nothing has moved for {self._still_steps} steps"
            demand(self._still_steps < STILL_STEPS_MAX, PROGRESS, still)
        if PROGRESS_CLOCK and self._setup.scenario.steady:
            counters = self._probe.manager.counters
            late = counters.deadlines_expired - self._ended_by_loads
            demand(not late, IN_FULL, f"{late} lookups were given up, although no tier was late")
            failed = dict(counters.reads_failed)
            demand(not any(failed.values()), IN_FULL, f"reads failed, although no call was late: {failed}")

    def check_account(self, loading: Mapping[str, set[int]]) -> None:
        """Slots that requests hold, and those of them that jobs copy, are together within the share.

        loading: slots of the jobs in flight, by request. Chunks that no request held before their load do not count.
        """
        if not PROGRESS_CLOCK:
            return
        held, chunks_max = self._probe.held_slots()
        self._held = {one: self._held.get(one, set()) | held.get(one, set()) for one in held.keys() | loading.keys()}
        used = set[int]().union(*held.values(), *(slots & self._held[one] for one, slots in loading.items()))
        demand(len(used) <= chunks_max, ACCOUNT, f"{len(used)} slots are held or copied, {chunks_max} may be")
