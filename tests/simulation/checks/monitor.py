"""Monitor: checks every message between engine, stack and tiers, with its bytes, as it passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from simulation.checks.counters import CounterChecks
from simulation.checks.failure import Violation, demand
from simulation.checks.probe import Probe
from simulation.checks.service import PROGRESS, ServiceChecks
from simulation.checks.trace import Trace
from simulation.checks.writes import WriteChecks
from simulation.drawing.features import ENCRYPTED, LOSSY
from simulation.drawing.run_spec import RunSpec, TierSetup, codec_name
from simulation.engine.expected_bytes import SimRequest, Truth
from simulation.engine.kv_memory import WRONG_BYTES
from simulation.engine.sequences import EngineSequence
from simulation.world.storage import DETACHED, Storage
from tierkv.frames.frame import HEADER_BYTES, NO_CODEC, parse_header
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.engine import LoadReport
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind, TierHealth, TierListing, TierOp, TierReport, Verb
from tierkv.types.transfers import VOID_SLOT, ConnectorMeta, TransferJob, WorkerOutput

SLOTS = "no slot is written by two at once"
JOBS = "every job ends exactly once"
EVENTS = "events replayed give the resident set"
OFFERS = "what is offered is readable"
RESET = "a reset forgets everything"
CONCEALED = "no plain text where a tier is encrypted"
EXACT = "no approximation where a tier is exact"
HOST = "host"

_NOT_TAKEN = (OutcomeKind.CORRUPT, OutcomeKind.REFUSED, OutcomeKind.NO_SPACE)


@dataclass(slots=True)
class SlotUse:
    """Current readers and writers of each slot of the host tier."""

    readers: dict[int, set[str]] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)

    def begin(self, slots: Iterable[int], user: str, *, writes: bool) -> None:
        """``user`` uses these slots from now on."""
        for slot in slots:
            writer, readers = self.writers.get(slot), self.readers.get(slot)
            demand(writer is None, SLOTS, f"{user} uses slot {slot} while {writer} writes it")
            demand(not (writes and readers), SLOTS, f"{user} writes slot {slot} while {readers} read it")
            if writes:
                self.writers[slot] = user
            else:
                self.readers.setdefault(slot, set()).add(user)

    def end(self, slots: Iterable[int], user: str, *, writes: bool) -> None:
        """Undo :meth:`begin`."""
        for slot in slots:
            if writes:
                self.writers.pop(slot, None)
            else:
                self.readers.get(slot, set()).discard(user)


@dataclass(slots=True)
class LiveJob:
    """Transfer that workers were instructed to make, and the workers that have not reported its end."""

    job: TransferJob
    left: set[int]
    since_s: float
    failed: set[Key] = field(default_factory=set)


class Monitor:
    """Observer of the engine's calls, and of the instructions to workers and tiers.

    Attributes:
        service: checks of the answers themselves. counts: of the counters.
        residents: per tier, the keys that are readable there according to events.
        truth: the right bytes.
        rotten: slots of the host tier that were damaged on purpose, with their chunks since.
        offers, deferrals: numbers of answers.
        left: numbers of detached tiers.
        not_written: chunks that were not written: their slot was bad, too much waited, or the storage was full of
            frames that the stack does not know.
    """

    def __init__(
        self,
        setup: RunSpec,
        probe: Probe,
        truth: Truth,
        trace: Trace,
        storages: Mapping[str, Storage],
    ) -> None:
        self.residents: dict[str, set[Key]] = {HOST: set()}
        self.rotten: dict[int, bytes] = {}
        self.offers = 0
        self.deferrals = 0
        self.jobs: dict[int, LiveJob] = {}
        self._probe = probe
        self.truth = truth
        self._trace = trace
        self.service = ServiceChecks(setup, probe, trace, storages)
        self.counts = CounterChecks(setup, probe, trace.clock)
        self._writes = WriteChecks(setup, storages)
        self._workers = setup.engine.num_workers
        self._storages = storages
        self._slots = SlotUse()
        self._ops: dict[int, TierOp] = {}
        self._last_job = 0
        self._stale: set[int] = set()
        self._void: list[tuple[Key, int]] = []
        self._stale_loads: dict[str, set[int]] = {}
        self._loaded: dict[str, set[int]] = {}
        self._aborted: set[str] = set()
        self._stale_reads: set[int] = set()
        self.left: set[int] = set()
        self.not_written = 0
        probe.listen(self.submitted, self.drained, self.handed_out, self.reported)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answered(self, sequence: EngineSequence[SimRequest], local: int, answer: int | None) -> None:
        """A deferral ends within its deadline, and every byte of an offer is readable."""
        request_id = sequence.request.request_id
        self._trace.note("answer", request_id, f"local {local}:", answer)
        self.counts.answered(request_id, answer)
        if answer is None:
            self.deferrals += 1
            if any(live.job.request_id == request_id for live in self.jobs.values()):
                self.service.forget(request_id)  # it waits for a worker, not for a tier
                return
            self.service.asked(request_id)
            self.service.deferred(request_id)
            return
        self.service.asked(request_id)
        keys = {key for group in self.truth.geometry.groups for key in self.truth.keys(sequence.request, group.index)}
        loads = [live.job for live in self.jobs.values() if not live.job.is_store]
        coming = any(job.request_id != request_id and not keys.isdisjoint(job.keys) for job in loads)
        self.service.answered(sequence, local, answer, coming=coming)
        possible = 0 <= answer <= sequence.request.num_tokens - local
        demand(possible, OFFERS, f"{request_id}: {answer} tokens beyond {local}")
        if answer:
            self.offers += 1
            self._check_offer(sequence, local, answer)

    def _check_offer(self, sequence: EngineSequence[SimRequest], local: int, answer: int) -> None:
        held = self._probe.offered_slots(sequence.request.request_id)
        streamed = self._probe.streamed_keys(sequence.request.request_id)
        for group in self.truth.geometry.groups:
            keys = self.truth.keys(sequence.request, group.index)
            last = cdiv(local + answer, group.chunk_tokens)
            first = local // group.chunk_tokens
            if group.window_chunks is not None:
                first = max(first, last - group.window_chunks)
            for key in keys[first:last]:
                demand(
                    key in held or key in streamed,
                    OFFERS,
                    f"{sequence.request.request_id}: chunk {key.hex()} is not held for it",
                )
        for key, slot in held.items():
            if key not in streamed:  # those have a slot, at most, that is being filled
                self.check_slot(key, slot, f"offered to {sequence.request.request_id}")

    def check_slot(self, key: Key, slot: int, why: str) -> None:
        """A slot has the right bytes of its chunk, or was damaged on purpose."""
        found = bytes(self._probe.arena.payload(slot)[: len(self.truth.payloads[key])])
        if not self.truth.is_right(key, found) and self.rotten.get(slot) != self.slot_bytes(slot):
            raise Violation(WRONG_BYTES, f"slot {slot} holds foreign bytes as chunk {key.hex()}, {why}")

    def slot_bytes(self, slot: int) -> bytes:
        """Bytes of a whole slot."""
        return bytes(self._probe.arena.slot(slot))

    # -- transfers ---------------------------------------------------------------------------------------------------

    def handed_out(self, meta: ConnectorMeta) -> None:
        """New jobs begin to use their slots."""
        for job in (*meta.loads, *meta.stores):
            self._trace.note(
                "store" if job.is_store else "load", job.job_id, f"of {job.request_id}:", job.keys, "slots",
                [ref.slot for ref in job.slots], "blocks", job.block_ids,
            )  # fmt: skip
            demand(job.job_id > self._last_job, JOBS, f"job id {job.job_id} was given after {self._last_job}")
            self._slots.begin(_slots(job), _name(job), writes=job.is_store)
            if not job.is_store:
                self._check_load(job, meta.jobs_to_flush)
            self.jobs[job.job_id] = LiveJob(job, set(range(self._workers)), self._trace.clock())
        self.counts.handed_out(meta.loads, len(meta.stores))
        if meta.loads or meta.stores:
            self._last_job = max(job.job_id for job in (*meta.loads, *meta.stores))
        if meta.jobs_to_flush:
            self._trace.note("flush", sorted(meta.jobs_to_flush))

    def _check_load(self, job: TransferJob, flushed: frozenset[int]) -> None:
        """A load's jobs follow each other; the last may join one. Only it ends the load, or names missing chunks."""
        loading = self._loaded.setdefault(job.request_id, set())
        void = VOID_SLOT in job.slots
        demand(
            not void or job.ends_load, JOBS, f"{_name(job)} of {job.request_id} is not its last, and leaves out some"
        )
        before = [live.job.job_id for live in self.jobs.values() if live.job.request_id == job.request_id]
        follows = flushed.issuperset(before) or len(before) <= job.ends_load
        demand(follows, JOBS, f"{_name(job)} of {job.request_id} was given before {before} had ended")
        again = loading.intersection(job.block_ids)
        demand(not again, JOBS, f"{_name(job)} of {job.request_id} fills blocks {sorted(again)} once more")
        loading.update(job.block_ids)

    def reported(self, worker: int, output: WorkerOutput) -> None:
        """Jobs end; their copies are compared before the stack takes them in."""
        for job_id in output.finished:
            live = self.jobs.get(job_id)
            if live is None or worker not in live.left:
                raise Violation(JOBS, f"worker {worker} reports job {job_id}, which it does not have")
            live.left.discard(worker)
            live.failed |= output.failed_keys.get(job_id, frozenset())
            if not live.left:
                self.service.moved()
                self._ended(live)
                del self.jobs[job_id]

    def _ended(self, live: LiveJob) -> None:
        job = live.job
        if job.is_store:
            self.counts.store_ended()
        self._trace.note("ended", job.job_id, "failed:" if live.failed else "", sorted(live.failed))
        for key, ref in zip(job.keys, job.slots, strict=True):
            if ref == VOID_SLOT:
                demand(key in live.failed, JOBS, f"{_name(job)} of {job.request_id}: a void chunk was copied")
            elif key not in live.failed:
                self.check_slot(key, ref.slot, f"{_name(job)} of {job.request_id} copied it")
            elif job.is_store or self.rotten.get(ref.slot) != self.slot_bytes(ref.slot):
                raise Violation(OFFERS, f"{_name(job)} of {job.request_id}: chunk {key.hex()} could not be copied")
        self._slots.end(_slots(job), _name(job), writes=job.is_store)
        if job.job_id in self._stale and job.is_store:
            self._void += [(key, ref.slot) for key, ref in zip(job.keys, job.slots, strict=True)]
        elif job.job_id in self._stale:
            self._stale_loads.setdefault(job.request_id, set()).update(job.block_ids)

    def loads_ended(self, report: LoadReport) -> None:
        """Transfers older than a reset do not count: loaded blocks are invalid, stored chunks are dropped."""
        for request_id in report.finished:
            self._loaded.pop(request_id, None)
            stale = self._stale_loads.pop(request_id, set())
            wrong = set() if request_id in self._aborted else stale - report.invalid_block_ids
            self._aborted.discard(request_id)
            demand(not wrong, RESET, f"blocks {sorted(wrong)} were loaded before the reset, and are called valid")
        void = {storage for storage in self._void if storage in self._probe.ready_slots()}
        demand(not void, RESET, f"slots {sorted(slot for _, slot in void)} hold what is from before the reset")
        self._void.clear()

    def aborted(self, request_id: str) -> None:
        """The load of an aborted request goes on; its blocks are not read."""
        self._aborted.add(request_id)

    def was_reset(self, tiers: Iterable[str]) -> None:
        """The host tier and these lower tiers were emptied."""
        self._stale |= self.jobs.keys()
        for request_id, block_ids in self._loaded.items():  # by jobs that have ended, too
            self._stale_loads.setdefault(request_id, set()).update(block_ids)
        self._stale_reads |= {op_id for op_id, op in self._ops.items() if op.verb is Verb.READ}
        left = self._probe.ready_slots()
        demand(not left, RESET, f"slots {[slot for _, slot in left]} are still readable")
        for name in tiers:
            writes = [op for op in self._ops.values() if op.verb is Verb.WRITE and self._probe.name_of(op.tier) == name]
            storage = self._storages[name]
            # A hung write of a tier that has left the name for another one says nothing about frames of that one.
            storage.was_emptied(key for op in writes if op.tier not in self.left for key in op.keys)
            known = [key.hex() for key in storage.stale if self._probe.is_known(name, key)]
            demand(not known, RESET, f"{name} still answers {known}")

    # -- tiers -------------------------------------------------------------------------------------------------------

    def submitted(self, op: TierOp) -> None:
        """An operation is submitted to a tier."""
        self._trace.note(op.verb.value, op.op_id, f"tier {op.tier}:", op.keys, "slots", [ref.slot for ref in op.slots])
        name = self._probe.name_of(op.tier)
        if op.verb is Verb.READ:
            stale = [key.hex() for key in op.keys if key in self._storages[name].stale]
            demand(not stale, RESET, f"{name} is to read {stale}, which are from before the cache was emptied")
        alone = op.tier not in self.left or op.verb is Verb.DELETE  # of what it was late to write
        demand(alone, DETACHED, f"{op.verb.value} of {len(op.keys)} chunks goes to {name}, which was detached")
        self._writes.submitted(name, op)
        self.counts.submitted(name, op)
        self._ops[op.op_id] = op
        self._slots.begin((ref.slot for ref in op.slots), f"op {op.op_id}", writes=op.verb is Verb.READ)

    def drained(self, completion: list[TierReport]) -> None:
        """A tier reports completions; bytes that it read are compared before the manager takes them in."""
        for word in completion:
            if isinstance(word, TierHealth):
                self._trace.note("health", f"tier {word.tier}", word.usable, word.reason)
                continue
            if isinstance(word, TierListing):
                self._trace.note("listed", f"tier {word.tier}", list(word.content.keys))
                continue
            op = self._ops[word.op_id]
            kinds = [outcome.kind.value for outcome in word.outcomes]
            self._trace.note("done" if word.ended else "late", f"op {op.op_id}", kinds)
            if op.verb in (Verb.READ, Verb.PROBE):
                self.service.moved()
            if word.ended:
                self._op_ended(op, word.outcomes)

    def _op_ended(self, op: TierOp, outcomes: tuple[Outcome, ...]) -> None:
        """The I/O of an operation has ended."""
        del self._ops[op.op_id]
        self._slots.end((ref.slot for ref in op.slots), f"op {op.op_id}", writes=op.verb is Verb.READ)
        storage = self._storages[self._probe.name_of(op.tier)]
        self._writes.ended(storage.name, op, outcomes)
        self.counts.ended(storage.name, op, outcomes)
        if op.verb is Verb.WRITE:
            storage.stale_writes.difference_update(op.keys)
            self.not_written += sum(outcome.kind in _NOT_TAKEN for outcome in outcomes)
        if op.op_id in self._stale_reads:
            self._void += [(key, ref.slot) for key, ref in zip(op.keys, op.slots, strict=True)]
        for i, (key, outcome) in enumerate(zip(op.keys, outcomes, strict=True)):
            if op.verb is Verb.READ and outcome.kind is OutcomeKind.OK:
                self.check_slot(key, op.slots[i].slot, f"read by op {op.op_id}")
            elif op.verb is Verb.DELETE and outcome.kind is not OutcomeKind.OK:
                storage.suspects.add(key)  # it may be gone all the same

    def check_frame(self, tier: TierSetup, key: Key, frame: memoryview) -> bool:
        """A stack writes a frame to a tier: it must be the right one.

        Returns:
            False where it was damaged on purpose.
        """
        raw = bytes(frame)
        if any(rotten[: len(raw)] == raw for rotten in self.rotten.values()):
            return False
        header = parse_header(frame)
        demand(header.key == key, WRONG_BYTES, f"the frame of {header.key.hex()} is written as {key.hex()}")
        clear = header.codec != ENCRYPTED or self.truth.payloads[key] in raw
        written = f"chunk {key.hex()} is written with {header.codec}"
        demand(not (clear and codec_name(tier) == ENCRYPTED), CONCEALED, written)
        demand(tier.options["lossy"] or not header.approximate, EXACT, f"{written} to {tier.name}")
        demand(self.is_right_frame(key, raw), WRONG_BYTES, f"foreign bytes are written as chunk {key.hex()}")
        return True

    def is_right_frame(self, key: Key, frame: bytes) -> bool:
        """Whether the payload of a frame is right. Encrypted and compressed frames are checked where they are read."""
        header = parse_header(memoryview(frame))
        stored = frame[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
        if header.codec in LOSSY:
            return self.truth.is_right(key, self.truth.approximations.decoded(stored, header.raw_bytes))
        return header.codec != NO_CODEC or self.truth.is_right(key, stored)

    @property
    def loading_slots(self) -> dict[str, set[int]]:
        """Slots of the loads in flight, by request."""
        slots: dict[str, set[int]] = {}
        for live in self.jobs.values():
            if not live.job.is_store:
                slots.setdefault(live.job.request_id, set()).update(_slots(live.job))
        return slots

    @property
    def is_reading(self) -> bool:
        """Whether a probe or read is in flight."""
        return any(op.verb in (Verb.READ, Verb.PROBE) for op in self._ops.values())

    # -- events ------------------------------------------------------------------------------------------------------

    def replay(self, events: Iterable[CacheEvent], indexed: set[str]) -> None:
        """Take in the stack's cache events."""
        for event in events:
            self._trace.note("event", event.kind.value, event.tier, event.keys)
            residents = self.residents.setdefault(event.tier, set())
            match event.kind:
                case CacheEventKind.STORED:
                    residents.update(event.keys)
                case CacheEventKind.REMOVED:
                    known = event.tier not in indexed or residents.issuperset(event.keys)
                    demand(known, EVENTS, f"{event.tier} lost {[key.hex() for key in event.keys]}, not all of it there")
                    residents.difference_update(event.keys)
                case CacheEventKind.CLEARED:
                    residents.clear()


def _slots(job: TransferJob) -> list[int]:
    """Slots that a job copies from or to."""
    return [ref.slot for ref in job.slots if ref != VOID_SLOT]


def _name(job: TransferJob) -> str:
    return f"{'store' if job.is_store else 'load'} {job.job_id}"


__all__ = ["HOST", "PROGRESS", "LiveJob", "Monitor", "SlotUse"]
