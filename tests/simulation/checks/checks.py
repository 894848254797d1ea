"""Invariants after every step, after a restart, and when everything has come to rest (spec, section 18)."""

from __future__ import annotations

from collections.abc import Mapping

from simulation.checks.evictions import EvictionChecks
from simulation.checks.exception_guard import INSIDE, guarded
from simulation.checks.failure import Violation, demand
from simulation.checks.monitor import EVENTS, HOST, JOBS, PROGRESS, RESET, Monitor
from simulation.checks.probe import Probe
from simulation.checks.quotas import QuotaChecks
from simulation.checks.trace import Trace
from simulation.drawing.run_spec import RunSpec
from simulation.engine.engine import BatchingEngine
from simulation.engine.expected_bytes import SimRequest
from simulation.engine.kv_memory import WRONG_BYTES
from simulation.world.storage import Storage
from tierkv.errors import InvariantError
from tierkv.types.keys import Key

CAPACITY = "a tier keeps within its capacity"
BOUNDED = "queues are bounded"
DURABLE = "what was acknowledged stays"
LEFTOVERS = "nothing is left over"
POLICIES = "no policy of our own fails"

JOB_S_MAX = 60.0
"""Longest time of a transfer in flight: copies do not hang here."""

STEPS_MAX = 1200
"""Longest time of a request in the engine while tiers have faults."""


class Checks:
    """Invariants of one process, checked from outside."""

    def __init__(
        self,
        setup: RunSpec,
        probe: Probe,
        monitor: Monitor,
        engine: BatchingEngine[SimRequest],
        storages: Mapping[str, Storage],
    ) -> None:
        self._setup = setup
        self._probe = probe
        self._monitor = monitor
        self._engine = engine
        self._storages = storages
        self._indexed = {tier.name for tier in setup.tiers if tier.capabilities.authoritative_index}
        self._owed: dict[str, set[Key]] = {}
        self.quotas = QuotaChecks(setup, probe)
        self._evictions = EvictionChecks(setup, probe)

    def opened(self) -> None:
        """A new process has listed the content of its tiers."""
        for name in self._indexed:
            self._monitor.residents[name] = self._probe.resident(name)

    # -- tiers that come and go --------------------------------------------------------------------------------------

    @property
    def _in_service(self) -> list[str]:
        """Tiers in service whose content an index lists."""
        return [name for name in self._probe.tiers() if name in self._indexed]

    def departs(self, name: str) -> None:
        """A tier is about to be detached: its content must be found when it is attached again."""
        if name in self._indexed:
            self._hear()
            self._owed[name] = self._owed_by(name)

    def was_emptied(self, name: str) -> None:
        """Expect no chunk of this tier any more."""
        self._owed.pop(name, None)

    def comes(self, name: str) -> None:
        """A tier has listed its content and will be in service: chunks lost meanwhile are not expected."""
        self._owed.get(name, set()).difference_update(self._storages[name].suspects)

    def arrived(self, name: str) -> None:
        """A tier was attached, and has listed its content."""
        self.quotas.forget(name)
        if name in self._indexed:
            self._hear()
            self._monitor.residents[name] = self._probe.resident(name)
            self.demand_found({name: self._owed.pop(name, set()) - self._probe.leaving(name)})

    def _owed_by(self, name: str) -> set[Key]:
        return self._monitor.residents[name] - self._storages[name].suspects - self._probe.leaving(name)

    # -- after every step --------------------------------------------------------------------------------------------

    def after_step(self, trace: Trace, *, take_events: bool) -> None:
        """Check all invariants."""
        try:
            self._probe.scheduler.validate()
        except InvariantError as error:
            raise Violation(INSIDE, str(error)) from error
        if take_events:
            self._hear()
            self._check_residents()
        self._check_bounds()
        self._check_policies()
        self.quotas.after_step()
        self._evictions.after_step()
        waiting = {sequence.request.request_id for sequence in self._engine.waiting}
        self._monitor.service.after_step(waiting, outstanding=self._monitor.is_reading)
        self._monitor.service.check_account(self._monitor.loading_slots)
        self._monitor.counts.after_step()
        self._check_jobs(trace)

    def _hear(self) -> None:
        """Take the stack's events, and compare the resident sets."""
        with guarded("take_events"):
            events = self._probe.take_events()
        self._monitor.replay(events, {HOST, *self._indexed})

    def _check_residents(self) -> None:
        reported = self._monitor.residents
        listed = {key for key, _ in self._probe.ready_slots()}
        readable = self._probe.readable(listed | reported[HOST])
        demand(reported[HOST] == readable, EVENTS, f"host: {_difference(reported[HOST], readable)}")
        for name in self._in_service:
            resident = self._probe.resident(name)
            demand(reported[name] == resident, EVENTS, f"{name}: {_difference(reported[name], resident)}")
            self._check_kept(name, resident - self._probe.leaving(name))
        for name in reported.keys() - self._probe.tiers().keys() - {HOST}:
            demand(not reported[name], EVENTS, f"{name}: {_difference(reported[name], set())}, but it was detached")

    def _check_bounds(self) -> None:
        for storage in self._storages.values():
            if storage.violation is not None:
                raise storage.violation
            demand(not storage.over_capacity, CAPACITY, storage.over_capacity)
        for name in self._probe.tiers():
            waiting = self._probe.waiting_writes(name)
            demand(waiting <= self._setup.host_slots, BOUNDED, f"{waiting} chunks wait to be written to {name}")
        served = [self._setup.tier(name) for name in self._probe.served()]
        limit = sum(2 * tier.options["queue_ops_max"] + tier.capabilities.preferred_concurrency for tier in served)
        pending = self._probe.pending_io()
        demand(pending <= limit + self._probe.undrained(), BOUNDED, f"{pending} operations are in flight, not {limit}")

    def _check_policies(self) -> None:
        failed = {name: count for name, count in self._probe.manager.counters.policies_failed.items() if count}
        demand(not failed, POLICIES, f"policies of {', '.join(failed)} raised, or chose what is held")

    def _check_jobs(self, trace: Trace) -> None:
        live = self._monitor.jobs
        # The stack may know of more: of stores that it will hand out with the next step.
        demand(not live or self._probe.has_pending_work(), JOBS, f"jobs {sorted(live)} are live, the stack has no work")
        now_s = trace.clock()
        for job_id, job in live.items():
            demand(now_s - job.since_s < JOB_S_MAX, JOBS, f"job {job_id} is under way for {now_s - job.since_s:g} s")
        for sequence in self._engine.sequences:
            age = trace.step - sequence.born_step
            demand(age < STEPS_MAX, PROGRESS, f"{sequence.request.request_id} has not finished after {age} steps")

    # -- a restart ---------------------------------------------------------------------------------------------------

    def owed_after_restart(self, *, new_weights: bool) -> dict[str, set[Key]]:
        """Acknowledged chunks that must be found again, per durable tier with an index.

        Args:
            new_weights: whether the weights have changed, so that no older chunk is expected.
        """
        self._hear()
        if new_weights:
            for storage in self._storages.values():
                storage.suspects.update(storage.frames)
            return {}
        return {**self._owed, **{name: self._owed_by(name) for name in self._in_service}}

    def demand_found(self, owed: dict[str, set[Key]]) -> None:
        """The new process, or the new tier, lists these chunks, unless its storage could not be read."""
        for name, keys in owed.items():
            storage = self._storages[name]
            if not storage.index_lost:
                lost = [key.hex() for key in keys - storage.suspects if not self._probe.is_known(name, key)]
                demand(not lost, DURABLE, f"{name} has forgotten {lost}")

    # -- the end -----------------------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Check the state at rest: nothing is left over, and all stored bytes are right."""
        left = self._probe.leftovers()
        demand(not left, LEFTOVERS, str(left))
        demand(self._probe.slots_at_rest(), LEFTOVERS, "a slot is neither free nor evictable")
        held = self._engine.tables.pool.num_held
        demand(not held, LEFTOVERS, f"{held} GPU blocks are still held")
        for key, slot in self._probe.ready_slots():
            self._monitor.check_slot(key, slot, "at rest")
        for storage in self._storages.values():
            self._check_frames(storage)
            stale = storage.stale & storage.frames.keys() - storage.suspects - storage.orphans
            demand(not stale, RESET, f"{len(stale)} previous chunks stay in {storage.name} for ever")
        for name in self._in_service:
            storage = self._storages[name]
            if not storage.index_lost:
                self._check_kept(name, self._probe.resident(name))
                sure = storage.frames.keys() - storage.suspects - storage.orphans
                unknown = sure - self._probe.resident(name)
                demand(not unknown, CAPACITY, f"{name} holds {len(unknown)} frames that are not accounted for")
                self.quotas.check_frames(name, {key: len(storage.frames[key]) for key in sure})

    def _check_kept(self, tier: str, said: set[Key]) -> None:
        """Chunks in a tier's index are stored there, unless a fault has affected them."""
        storage = self._storages[tier]
        lost = said - storage.frames.keys() - storage.suspects
        demand(not lost, DURABLE, f"{storage.name} lacks {[key.hex() for key in lost]}, which it is said to hold")

    def _check_frames(self, storage: Storage) -> None:
        """Frames in a tier are right, unless a fault has affected them."""
        for key, frame in storage.frames.items():
            if key in storage.suspects:
                continue
            if key in self._monitor.truth.payloads:
                right = self._monitor.is_right_frame(key, frame)
                demand(right, WRONG_BYTES, f"{storage.name} holds foreign bytes as chunk {key.hex()}")


def _difference(reported: set[Key], found: set[Key]) -> str:
    extra, missing = reported - found, found - reported
    return f"reported, not there {[key.hex() for key in extra]}, there, not reported {[key.hex() for key in missing]}"
