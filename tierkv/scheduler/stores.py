"""Building store jobs: what a request has computed is offered to the manager, what it grants becomes a job."""

from __future__ import annotations

from tierkv.manager.manager import OffloadManager
from tierkv.scheduler.block_events import BlockEvents
from tierkv.scheduler.jobs import JobTable
from tierkv.scheduler.limits import FINAL_PASSES_MAX, SchedulerLimits
from tierkv.scheduler.records import RequestRecord
from tierkv.scheduler.store_plan import candidates, plan_store
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import TransferJob


class Stores:
    """The store half of the scheduler. Sans-IO."""

    def __init__(
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        jobs: JobTable,
        block_events: BlockEvents,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._jobs = jobs
        self._block_events = block_events
        self._new: list[TransferJob] = []

    def take_jobs(self) -> tuple[TransferJob, ...]:
        """The jobs built since the last call."""
        jobs, self._new = tuple(self._new), []
        return jobs

    def final_pass(self, record: RequestRecord) -> None:
        """The request ends and its blocks will not come back: the last chance to offer what it has computed."""
        for _ in range(FINAL_PASSES_MAX):
            if not self.offer(record):
                break

    def offer(self, record: RequestRecord) -> bool:
        """Offer what is computed and not yet offered. If the host tier has no room, the same is offered again later.

        Returns:
            Whether the manager took the offer, wholly or in part.
        """
        record.extend_keys(self._geometry)
        chunks_max = min(self._limits.store_chunks_per_step_max, self._manager.store_chunks_max)
        offered = candidates(record, self._geometry, self._offload_tokens(record), chunks_max)
        if not offered:
            return False
        grant = self._manager.prepare_store([(c.key, c.group) for c in offered], record.ctx)
        if grant is None:
            return False
        for candidate in offered:
            group = record.groups[candidate.group]
            group.next_stored = max(group.next_stored, candidate.index + 1)
        if not grant.keys:
            return True
        wanted = set(grant.keys)
        granted = [candidate for candidate in offered if candidate.key in wanted]
        plan = plan_store(record, self._geometry, granted)
        job = TransferJob(
            job_id=self._jobs.new_id(),
            request_id=record.ctx.request_id,
            is_store=True,
            keys=grant.keys,
            slots=grant.slots,
            chunk_groups=plan.chunk_groups,
            block_ids=plan.block_ids,
            group_sizes=plan.group_sizes,
            block_indices=plan.block_indices,
        )
        self._jobs.start(job)
        record.store_jobs.add(job.job_id)
        self._new.append(job)
        self._block_events.granted(record.request, granted)
        return True

    def _offload_tokens(self, record: RequestRecord) -> int:
        """How far from the start the request's tokens may be stored: computed, real, and wanted by its user."""
        tokens = min(record.computed_tokens, record.request.num_tokens)
        if self._limits.prompt_only:
            tokens = min(tokens, record.request.num_prompt_tokens)
        if record.offload_tokens_max is not None:
            tokens = min(tokens, record.offload_tokens_max)
        return tokens
