"""Worker that a test drives by hand: transfers wait until the test runs them, and copy real bytes."""

from __future__ import annotations

from collections.abc import Sequence

from core_tiers import GARBAGE
from core_truth import MISSING, TOKEN_BYTES, Audit, Truth

from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks

REPORTS_MAX = 1_000_000
"""More reports than any test has."""


class ScriptedWorker:
    """``num_workers`` ranks, of which the copies of the first one are real.

    Stores of a step are queued and may run from the next step on, as in a real worker; flushed jobs run at once.

    Attributes:
        damaged: slots whose bytes a test corrupted on purpose.
        open_loads: requests whose load has not had its last job.
        reports_max: largest number of reports of ranks per call.
    """

    def __init__(
        self,
        geometry: Geometry,
        truth: Truth,
        memory: list[bytes],
        gpu: dict[int, bytearray],
        audit: Audit,
        num_workers: int,
    ) -> None:
        self.queued: dict[int, TransferJob] = {}
        self.running: dict[int, TransferJob] = {}
        self.unreported: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.open_loads: set[str] = set()
        self.reports_max = REPORTS_MAX
        self._failed: dict[int, frozenset[Key]] = {}
        self._geometry = geometry
        self._truth = truth
        self._memory = memory
        self._gpu = gpu
        self._audit = audit
        self._num_workers = num_workers

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, running or unreported."""
        return not (self.queued or self.running or self.unreported)

    def start_step(self, meta: ConnectorMeta) -> None:
        """Before the forward pass; order as in spec, section 16."""
        for job in meta.stores:
            for ref in job.slots:
                self._audit.begin_write(("slot", ref.slot), f"job {job.job_id}")
        urgent = [job for job in meta.stores if job.job_id in meta.jobs_to_flush]
        for job in (*self.queued.values(), *urgent):
            self._start(job)
        self.queued.clear()
        for job_id in meta.jobs_to_flush:
            if job_id in self.running:
                self.run(job_id)
        for job in meta.loads:
            self._start(job)
            if job.job_id in meta.jobs_to_flush:
                self.run(job.job_id)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """After the forward pass. From now on the source blocks must stay as they are."""
        for job in meta.stores:
            if job.job_id not in meta.jobs_to_flush:
                self._lock_blocks(job)
                self.queued[job.job_id] = job

    def _lock_blocks(self, job: TransferJob) -> None:
        for block_id in self._touched(job):
            assert block_id != NULL_BLOCK_ID
            if job.is_store:
                self._audit.begin_read(("gpu", block_id), f"job {job.job_id}")
            else:
                self._audit.begin_write(("gpu", block_id), f"job {job.job_id}")

    def _touched(self, job: TransferJob) -> list[int]:
        """Blocks of a job that are copied; those of void chunks may belong to another request."""
        parts = zip(job.slots, chunk_blocks(job, self._geometry.blocks_per_chunk), strict=True)
        return [block_id for ref, (_, ids) in parts if ref != VOID_SLOT for block_id in ids]

    def _start(self, job: TransferJob) -> None:
        if job.job_id not in self.queued:
            self._lock_blocks(job)
        self._check_stream(job)
        if not job.is_store:
            for ref in job.slots:
                if ref != VOID_SLOT:
                    self._audit.begin_read(("slot", ref.slot), f"job {job.job_id}")
        self.running[job.job_id] = job

    def _check_stream(self, job: TransferJob) -> None:
        """Check that the jobs of a load arrive one by one, but for the last, and that only that one ends it."""
        assert VOID_SLOT not in job.slots or (job.ends_load and not job.is_store)
        if job.is_store:
            assert job.ends_load
            return
        same = [other for other in self.running.values() if other.request_id == job.request_id and not other.is_store]
        assert len(same) <= job.ends_load, f"jobs {same[0].job_id} and {job.job_id} of one load are in flight together"
        self.open_loads.add(job.request_id)
        if job.ends_load:
            self.open_loads.remove(job.request_id)

    def run(self, job_id: int, failing: Sequence[bool] = ()) -> None:
        """Perform a started transfer. failing: per chunk, whether its copy fails; chunks beyond its end succeed."""
        job = self.running.pop(job_id)
        failed: set[Key] = set()
        parts = chunk_blocks(job, self._geometry.blocks_per_chunk)
        zipped = zip(job.keys, job.slots, job.chunk_groups, parts, strict=True)
        for i, (key, ref, group, (skip, block_ids)) in enumerate(zipped):
            fails = i < len(failing) and failing[i]
            copy = self._store if job.is_store else self._load
            if ref == VOID_SLOT or not copy(key, ref.slot, group, skip, block_ids, fails):
                failed.add(key)
        self._unlock(job)
        self.unreported[job_id] = self._num_workers
        if failed:
            self._failed[job_id] = frozenset(failed)

    def _store(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int], fails: bool) -> bool:
        self.damaged.discard(slot)
        sizes = self._geometry.groups[group]
        assert skip <= self._geometry.blocks_per_chunk - sizes.tail_blocks, "a hit would miss blocks"
        block_tokens = sizes.block_tokens
        payload = MISSING * (skip * block_tokens)
        payload += b"".join(bytes(self._gpu[block_id][: block_tokens * TOKEN_BYTES]) for block_id in block_ids)
        if fails:
            self._memory[slot] = GARBAGE
            return False
        assert self._truth.is_good(key, payload), f"foreign bytes are stored as chunk {key.hex()} of group {group}"
        self._memory[slot] = payload
        return True

    def _load(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int], fails: bool) -> bool:
        payload = self._memory[slot]
        block_bytes = self._geometry.groups[group].block_tokens * TOKEN_BYTES
        if not self._truth.is_good(key, payload):
            assert slot in self.damaged, f"slot {slot} holds foreign bytes as chunk {key.hex()}"
            fails = True
        for i, block_id in enumerate(block_ids):
            start = (skip + i) * block_bytes
            assert fails or MISSING not in payload[start : start + block_bytes], "what was never stored is loaded"
            self._gpu[block_id][:block_bytes] = bytes(block_bytes) if fails else payload[start : start + block_bytes]
        return not fails

    def _unlock(self, job: TransferJob) -> None:
        who = f"job {job.job_id}"
        for block_id in self._touched(job):
            (self._audit.end_read if job.is_store else self._audit.end_write)(("gpu", block_id), who)
        for ref in job.slots:
            if ref != VOID_SLOT:
                (self._audit.end_write if job.is_store else self._audit.end_read)(("slot", ref.slot), who)

    def get_finished(self) -> WorkerOutput:
        """Report ended jobs, at most ``reports_max`` reports of ranks."""
        reports_max = self.reports_max
        finished: dict[int, int] = {}
        failed: dict[int, frozenset[Key]] = {}
        for job_id in list(self.unreported):
            count = min(reports_max, self.unreported[job_id])
            if not count:
                break
            reports_max -= count
            finished[job_id] = count
            self.unreported[job_id] -= count
            if not self.unreported[job_id]:
                del self.unreported[job_id]
                if job_id in self._failed:
                    failed[job_id] = self._failed.pop(job_id)
        return WorkerOutput(finished, failed)
