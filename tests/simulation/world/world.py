"""World: one run of users, an engine, a stack, its tiers and their faults, step by step, from one seed."""

from __future__ import annotations

from random import Random

from simulation.checks.exception_guard import guarded
from simulation.checks.failure import Violation, demand
from simulation.checks.heads import check_heads
from simulation.checks.monitor import HOST, PROGRESS, RESET
from simulation.checks.service import PROGRESS_CLOCK
from simulation.checks.trace import Trace
from simulation.drawing.run_spec import RunSpec, TierSetup
from simulation.drawing.workload import Workload
from simulation.engine.expected_bytes import ANONYMOUS, SimRequest, User
from simulation.world.fault_schedule import Fault, FaultSchedule
from simulation.world.process import CLOSE_AT_REST_S, Era, Process
from simulation.world.storage import Storage, flipped
from simulation.world.tier_churn import Mover
from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES, checksum, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.engine import GroupKind
from tierkv.types.keys import Key, split_key
from tierkv.types.transfers import VOID_SLOT

NAMED = "a wrong call is a named error"

MORE_IN_LOAD = 5
"""Factor of the rate of resets and flipped slots while a load is in flight: the harder case."""

COPY_S = (0.0, 0.0, 0.0, 0.001, 0.03, 0.03, 0.12, 0.25)
"""Durations of copies between GPU and host; some last for several steps of the engine."""

SETTLE_STEPS_MAX = 1500
"""Steps within which a run must come to rest after the last fault."""


class World:
    """One run. ``setup`` determines it; only the world moves ``clock``; ``trace`` gets a note of every event.

    Attributes:
        totals: counts of what was reached, for reports.
    """

    def __init__(self, setup: RunSpec, clock: ManualClock, trace: Trace) -> None:
        self.setup = setup
        self.trace = trace
        self.clock = clock
        self.totals: dict[str, int] = {}
        self.workload = Workload(setup, Random(f"workload {setup.seed}"), loops=PROGRESS_CLOCK)
        self._by_name = {
            tier.name: Storage(tier.name, tier.capacity_bytes, _weather(setup, tier)) for tier in setup.tiers
        }
        self.storages = list(self._by_name.values())
        self._chance = Random(f"chance {setup.seed}")
        self._durations = Random(f"durations {setup.seed}")
        self._era = Era()
        self._requests = 0
        self._moves = Random(f"moves {setup.seed}")
        self.process = self._start(self._era)
        if setup.scenario.stocked:
            self._stock()

    def _start(self, era: Era) -> Process:
        process = Process(self.setup, self._by_name, self.clock, self.trace, self._duration, era)
        self._mover = Mover(self.setup, process, self._by_name, self._moves)
        return process

    def _duration(self, thread: str) -> float:
        storage = self._by_name.get(thread.split("-")[1])
        if storage is not None:
            return storage.fault_schedule.duration()
        return self._durations.choice(COPY_S)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Move time and faults, let users act and the engine step, and check everything."""
        self.trace.step += 1
        self._pass_time(self.workload.pause_s())
        if self._chance.random() < self.setup.scenario.kill:
            self._restart(orderly=False)
        elif self._chance.random() < self.setup.scenario.close:
            self._restart(orderly=True)
        self._mischief()
        if self.setup.tiers and self._moves.random() < self.setup.scenario.changes:
            self._mover.move()
        with guarded("engine step"):
            self._users()
            self.process.engine.step(self.workload.behaviour())
        self._look(take_events=self._chance.random() < 0.8)

    def _pass_time(self, seconds: float) -> None:
        self.process.pass_time(seconds)
        for storage in self.storages:
            before = storage.fault_schedule.fault
            if storage.fault_schedule.advance(self.clock()):
                self.trace.note("weather", storage.name, storage.fault_schedule.fault.value)
                if before is Fault.HUNG:
                    self.process.executor.release(f"tierkv-{storage.name}-")

    def _users(self) -> None:
        """Let requests arrive, be aborted, and the cache be reset."""
        engine, plan, chance = self.process.engine, self.setup.scenario, self._chance
        for tokens, user, new_tokens, params, loop_tokens in self.workload.arrivals(len(engine.sequences)):
            self._requests += 1
            if loop_tokens is not None:
                self._refused(self._request(f"r{self._requests}", tokens, params, user, loop_tokens))
            request = self._request(f"r{self._requests}", tokens, params, user)
            engine.add(request, new_tokens, self.trace.step)
            size = f"{len(tokens)} tokens + {new_tokens}"
            loop = f"first in loops of {loop_tokens}" if loop_tokens else ""
            who = "" if user == ANONYMOUS else tuple(user)
            self.trace.note("arrives", request.request_id, size, params or "", who, loop)
        if chance.random() < plan.abort and engine.sequences:
            loading = list(engine.loading.values())
            sequence = chance.choice(loading if loading and chance.random() < 0.5 else engine.sequences)
            self.trace.note("abort", sequence.request.request_id)
            engine.abort(sequence)
        if chance.random() < plan.reset * (MORE_IN_LOAD if self._slots_loading() else 1):
            self._reset()

    def _refused(self, request: SimRequest) -> None:
        """Announce a request whose hashes may repeat: then it is refused, and may be announced again, rightly."""
        if len(set(request.block_hashes)) == len(request.block_hashes):
            return
        try:
            self.process.stack.on_new_request(request)
        except EngineProtocolError as error:
            demand(error.request_id == request.request_id and "repeats" in str(error), NAMED, f"it says: {error}")
        else:
            raise Violation(NAMED, f"{request.request_id} has a hash twice, and is accepted")

    def _request(
        self,
        name: str,
        tokens: list[int],
        params: dict[str, object] | None,
        user: User,
        loop_tokens: int | None = None,
    ) -> SimRequest:
        size, scoped = self.setup.engine.hash_block_tokens, self.setup.scoped_hashes
        return SimRequest(name, tokens, size, params, user, scoped_hashes=scoped, loop_tokens=loop_tokens)

    def _reset(self) -> None:
        """Empty the host tier, or all tiers; if one of them is read-only, none is emptied."""
        process = self.process
        everything = self._chance.random() < self.setup.scenario.reset_all
        self.trace.note("reset", "all" if everything else "host")
        tiers = [self.setup.tier(name) for name in process.probe.tiers()] if everything else []
        ours = all(not tier.capabilities.shared and tier.options["write"] != "read_only" for tier in tiers)
        before = process.probe.ready_slots()
        try:
            process.stack.reset_cache("all" if everything else "host")
        except EngineProtocolError as error:
            demand(not ours and process.probe.ready_slots() == before, RESET, f"refused: {error}")
            self._reached("resets_refused", 1)
            return
        demand(ours, RESET, "chunks that are not ours were deleted")
        for tier in tiers:
            process.checks.was_emptied(tier.name)
            self._reached("tiers_emptied", 1)
        process.monitor.was_reset([tier.name for tier in tiers])

    def _look(self, *, take_events: bool) -> None:
        for request in self.process.engine.finished:
            self.workload.finished(request)
        self.process.engine.finished.clear()
        self._mover.after_step()
        self.process.checks.after_step(self.trace, take_events=take_events)

    def _restart(self, *, orderly: bool) -> None:
        before = self.process
        if orderly:
            before.close()
        else:
            before.kill()
        self._count()
        new_weights = self._chance.random() < self.setup.scenario.new_weights
        owed = before.checks.owed_after_restart(new_weights=new_weights)
        self._era = Era(self._era.number + 1, self._era.epoch + new_weights)
        self.process = self._start(self._era)
        if not new_weights:
            self.process.truth.take_over(before.truth)
        self.process.checks.demand_found(owed)
        for sequence in before.engine.sequences[: self.setup.running_max]:
            self.workload.resubmit(sequence.request)

    # -- mischief ----------------------------------------------------------------------------------------------------

    def _mischief(self) -> None:
        """Let bits flip, frames be lost, and other engines write."""
        plan, chance = self.setup.scenario, self._chance
        loading = self._slots_loading()
        if loading and chance.random() < plan.rot * MORE_IN_LOAD:
            self._rot_slot(*chance.choice(loading))
        elif chance.random() < plan.rot:
            self._rot()
        if self.storages and chance.random() < plan.lose:
            storage = chance.choice(self.storages)
            storage.lose(chance.randint(1, 4))
            self.trace.note("lost", storage.name)
        shared = [storage for storage in self.storages if storage.capacity_bytes is None]
        if shared and chance.random() < plan.others:
            self._others_write(chance.choice(shared))

    def _rot(self) -> None:
        storage = self._chance.choice([*self.storages, None])
        if storage is not None:
            storage.rot(1)
            self.trace.note("rot", storage.name)
            return
        ready = self.process.probe.ready_slots()
        if ready:
            self._rot_slot(*self._chance.choice(ready))

    def _rot_slot(self, key: Key, slot: int) -> None:
        view = self.process.probe.arena.slot(slot)
        used = HEADER_BYTES + len(self.process.truth.payloads[key])
        view[:used] = flipped(bytes(view[:used]), self._chance)
        self.process.monitor.rotten[slot] = bytes(view)
        self.trace.note("rot", HOST, "slot", slot, key)

    def _slots_loading(self) -> list[tuple[Key, int]]:
        """Chunks that are being loaded to the GPU, with their slots."""
        process = self.process
        jobs = [live.job for live in process.monitor.jobs.values() if not live.job.is_store]
        pairs = [(key, ref) for job in jobs for key, ref in zip(job.keys, job.slots, strict=True)]
        return [(key, ref.slot) for key, ref in pairs if ref != VOID_SLOT]

    def _stock(self) -> None:
        """Put all prefixes into every tier, as a previous process would have, and start again."""
        before = self.process
        for storage in self.storages:
            for prefix in self.workload.prefixes:
                self._put_frames(storage, self._request("earlier", prefix, None, ANONYMOUS))
        before.kill()
        self._era = Era(self._era.number + 1, self._era.epoch)
        self.process = self._start(self._era)
        self.process.truth.take_over(before.truth)

    def _others_write(self, storage: Storage) -> None:
        """Let another engine with the same model store a prefix."""
        request = self._request("other", self.workload.prefix(), None, self.workload.random_user())
        self.trace.note("others write", storage.name, self._put_frames(storage, request))

    def _put_frames(self, storage: Storage, request: SimRequest) -> list[Key]:
        """Put the frames of a request's chunks into a storage. Returns their keys."""
        truth = self.process.truth
        truth.learn(request)
        sealer = FrameSealer(self.process.stack.namespace.fingerprint())
        keys: list[Key] = [key for group in truth.geometry.groups for key in truth.keys(request, group.index)]
        for key in keys:
            payload = truth.payloads[key]
            frame = bytearray(frame_bytes(len(payload)))
            frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
            parts = truth.geometry.groups[split_key(key)[1]].parts
            size = len(payload) // parts
            if parts == 1:
                sealer.seal(memoryview(frame), key, len(payload))
            else:
                checksums = [checksum(payload[part * size : (part + 1) * size]) for part in range(parts)]
                sealer.seal_parts(memoryview(frame), key, len(payload), checksums)
            storage.frames[key] = bytes(frame)
        return keys

    # -- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """End all faults: all requests finish, all I/O ends, and nothing is left over."""
        self.trace.note("settle")
        process = self.process
        for storage in self.storages:
            storage.fault_schedule.clear_up()
            process.executor.release(f"tierkv-{storage.name}-")
        for _ in range(SETTLE_STEPS_MAX):
            if self._is_quiet():
                break
            self.trace.step += 1
            self._mover.bring_back()
            self._pass_time(0.05)
            with guarded("engine step"):
                process.engine.step(self.workload.calm_behaviour())
            self._look(take_events=True)
        else:
            left = [f"{s.request.request_id} {s.computed}/{s.request.num_tokens}" for s in process.engine.sequences]
            kept = {**process.probe.leftovers(), **process.checks.quotas.over()}
            raise Violation(PROGRESS, f"no end after {SETTLE_STEPS_MAX} steps: {left}, {kept}")
        process.checks.at_rest()
        kinds = [group.kind for group in self.setup.engine.groups]
        if self.setup.scenario.name == "heads" and kinds == [GroupKind.FULL_ATTENTION]:
            prompt = self._request("whole", self.workload.prefixes[0], None, ANONYMOUS)
            check_heads(self.setup, process.probe, process.truth.keys(prompt, 0))
        before = process.monitor.not_written
        flushed = process.close(CLOSE_AT_REST_S)
        lost = process.monitor.not_written - before
        demand(flushed or lost, PROGRESS, "a stack at rest could not write all before it was closed")
        demand(not (flushed and lost), PROGRESS, f"{lost} chunks were not written, and it says that all were")
        self._count()

    def _is_quiet(self) -> bool:
        process = self.process
        return (
            not process.engine.sequences
            and not process.engine.orphans
            and not process.engine.held
            and not process.stack.has_pending_work()
            and not process.probe.leftovers()
            and not process.checks.quotas.over()
            and self._mover.is_idle
            and all(tier.phase.usable for tier in process.probe.tiers().values())
        )

    def abandon(self) -> None:
        """Free the resources of this run, in any state."""
        self.process.vanish()

    def _count(self) -> None:
        process = self.process
        reached = {
            "requests_finished": self.workload.done,
            "tokens_computed": process.engine.tokens_computed,
            "tokens_loaded": process.engine.tokens_loaded,
            "offers": process.monitor.offers,
            "processes": 1,
            "tiers_attached": self._mover.attached,
            "tiers_detached": self._mover.detached,
            "attachments_refused": self._mover.refused,
        }
        for name, value in process.stack.metrics.counters.as_dict().items():
            if name not in reached:
                reached[name] = value if isinstance(value, int) else sum(value.values())
        self.workload.done = 0
        for name, count in reached.items():
            self._reached(name, count)

    def _reached(self, name: str, count: int) -> None:
        self.totals[name] = self.totals.get(name, 0) + count


def _weather(setup: RunSpec, tier: TierSetup) -> FaultSchedule:
    rng = Random(f"weather {setup.seed} {tier.name}")
    return FaultSchedule(rng, tier.menu, tier.healthy_s, tier.faulty_s, tier.usual_s, tier.tail, tier.probe_key_s)
