"""Check of counters: each equals what was observed, because an operator sees nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from simulation.checks.failure import demand
from simulation.checks.probe import Probe
from simulation.drawing.run_spec import RunSpec
from tierkv.types.tier_ops import Outcome, OutcomeKind, TierOp, Verb
from tierkv.types.transfers import VOID_SLOT, TransferJob

COUNTED = "counters say what happened"

ROUNDING_S = 1e-6
"""Error of a sum of seconds."""

_QUESTIONS = (Verb.READ, Verb.PROBE)


class CounterChecks:
    """Counts what passes between engine, stack and tiers, and the time in which tiers are at work.

    Args:
        setup: spec of the run. A faulty tier may never answer, so time spent waiting is checked under load only.
        probe: the stack.
        clock: simulated time, in seconds.
    """

    def __init__(self, setup: RunSpec, probe: Probe, clock: Callable[[], float]) -> None:
        self._is_steady = setup.scenario.steady
        self._probe = probe
        self._clock = clock
        self._seen: Counter[str] = Counter()
        self._by_tier: dict[str, Counter[str]] = {"promotions": Counter(), "writes": Counter(), "probes": Counter()}
        self._expired = 0
        self._deferred: dict[str, tuple[float, float]] = {}  # seconds of tiers, and of its account, at that time
        self._under_way = 0
        self._busy_s = 0.0  # in which a tier was asked, or read, or a store copied chunks that requests may wait for
        self._last_s = clock()

    # -- answers -----------------------------------------------------------------------------------------------------

    def answered(self, request_id: str, answer: int | None) -> None:
        """A question was answered. Only one that was deferred before may be counted as expired, once."""
        expired = self._probe.manager.counters.deadlines_expired
        late, self._expired = expired - self._expired, expired
        self._seen["lookups"] += 1
        self._seen["deferrals"] += answer is None
        may_be_late = answer is not None and request_id in self._deferred
        demand(late <= may_be_late, COUNTED, f"{late} lookups expired with the answer {answer} to {request_id}")
        busy_s, tier_s = self._busy_until_now(), self._probe.deferred_tier_s(request_id)
        if answer is None:
            self._deferred.setdefault(request_id, (busy_s, tier_s))
        elif request_id in self._deferred:
            before_s, tier_before_s = self._deferred.pop(request_id)
            said_s, seen_s = tier_s - tier_before_s, busy_s - before_s
            what = f"{request_id} has waited for tiers for {said_s:g} s, and they were at work for {seen_s:g} s"
            demand(not self._is_steady or said_s <= seen_s + ROUNDING_S, COUNTED, what)

    def _busy_until_now(self) -> float:
        """Seconds in which any tier was asked, or read, or a store was under way."""
        now_s = self._clock()
        self._busy_s += now_s - self._last_s if self._under_way else 0.0
        self._last_s = now_s
        return self._busy_s

    # -- tiers -------------------------------------------------------------------------------------------------------

    def submitted(self, tier: str, op: TierOp) -> None:
        """An operation is submitted to a tier."""
        self._busy_until_now()
        self._under_way += op.verb in _QUESTIONS
        if op.verb is Verb.PROBE:
            self._by_tier["probes"][tier] += len(op.keys)

    def ended(self, tier: str, op: TierOp, outcomes: Iterable[Outcome]) -> None:
        """An operation has ended, and its results are passed to the stack."""
        self._busy_until_now()
        self._under_way -= op.verb in _QUESTIONS
        name = {Verb.READ: "promotions", Verb.WRITE: "writes"}.get(op.verb)
        if name is not None:
            self._by_tier[name][tier] += sum(outcome.kind is OutcomeKind.OK for outcome in outcomes)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def handed_out(self, loads: Iterable[TransferJob], num_stores: int) -> None:
        """Jobs were handed to the workers. Only the last job of a load that was cut short names void chunks."""
        self._busy_until_now()
        self._under_way += num_stores
        self._seen["loads_given_up"] += sum(VOID_SLOT in job.slots for job in loads)

    def store_ended(self) -> None:
        """All workers have ended a store."""
        self._busy_until_now()
        self._under_way -= 1

    # -- after every step --------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Compare the counters with what was seen."""
        counters = self._probe.manager.counters
        for name in ("lookups", "deferrals", "loads_given_up"):
            said, seen = getattr(counters, name), self._seen[name]
            demand(said == seen, COUNTED, f"{name} is {said}, and {seen} were seen")
        said_of = {
            "promotions": counters.promotions, "writes": counters.cascades + counters.demotions,
            "probes": counters.probes,
        }  # fmt: skip
        for name, seen_of in self._by_tier.items():
            counted, observed = +said_of[name], +seen_of
            demand(counted == observed, COUNTED, f"{name} are {dict(counted)}, and {dict(observed)} were seen")
