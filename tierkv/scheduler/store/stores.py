"""Store jobs: chunks are offered to the manager; granted ones become jobs.

The store plan (:mod:`tierkv.scheduler.store.plans`) decides when; all plans build their jobs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.limits import FINAL_PASSES_MAX, SchedulerLimits
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.store.candidates import (
    Candidate,
    Candidates,
    SourceBlocks,
    candidates,
    count_storable,
    skip_useless,
    source_blocks,
)
from tierkv.types.engine import Request
from tierkv.types.geometry import Geometry, batches
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key
from tierkv.types.transfers import NO_REQUEST, SlotRef, TransferJob, blocks_of_groups


@dataclass(frozen=True, slots=True)
class FreeChunk:
    """Chunk of one block that no request uses any more."""

    key: Key
    group: int
    number: int
    """Index of the chunk in its group."""
    block_id: int
    request: Request | None
    """Request that computed it; None: events need no description."""
    hints: RequestHints
    """Hints of the requests that computed or used it."""


AWAITED_MAX = 1024
"""Chunks of a request that are looked for at its end, because a tier was being read for them. Others may be lost."""

NOT_STORED_MAX = 256
"""Chunks of a request that are noted as not stored at its end. A hit needs these before the others."""

_NONE = Candidates()
_NO_GRANT = StoreGrant((), (), ())


class Stores:
    """Offers chunks to the manager and builds store jobs. Sans-IO."""

    def __init__(  # noqa: PLR0913, PLR0917 - the scheduler hands in its parts
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        jobs: JobTable,
        fences: Fences,
        block_events: BlockEvents,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._counters = counters
        self._jobs = jobs
        self._fences = fences
        self._windowed = frozenset(group.index for group in geometry.groups if group.window_chunks is not None)
        self._block_events = block_events
        self.job_chunks_max = max(1, limits.job_bytes_max // geometry.payload_bytes_max)
        """Chunks that one job copies at most."""
        self.new_jobs: list[TransferJob] = []
        """Jobs built since the previous :meth:`take_jobs`."""

    def take_jobs(self) -> tuple[TransferJob, ...]:
        """Jobs built since the previous call."""
        jobs, self.new_jobs = tuple(self.new_jobs), []
        return jobs

    @property
    def chunks_max(self) -> int:
        """Chunks that are offered together, if more wait than one step completes."""
        return self._chunks_max(0)

    def _chunks_max(self, new_tokens: int) -> int:
        """Chunks of a request that are offered together, if ``new_tokens`` have become storable since the last offer.

        Chunks that a step completes are always offered together. Otherwise a fast prompt would lose its end; the cost
        is a small part of computing it.
        """
        new = 0
        for group in self._geometry.groups:
            new -= -new_tokens // group.chunk_tokens  # rounded up
        return min(max(new, self._limits.store_chunks_per_step_max), self._manager.store_chunks_max)

    @property
    def has_windows(self) -> bool:
        """Whether the engine reuses blocks of a group while their request runs."""
        return bool(self._windowed)

    def blocks_to_offer(self, record: RequestRecord) -> frozenset[int]:
        """Blocks of a request behind its store cursors."""
        factor = self._geometry.blocks_per_chunk
        behind = [group.block_ids[group.next_stored * factor :] for group in record.groups]
        return frozenset(chain.from_iterable(behind))

    @property
    def describes_chunks(self) -> bool:
        """Whether events need the request of a stored chunk."""
        return self._block_events.active

    # -- what may be stored ------------------------------------------------------------------------------------------

    def storable_tokens(self, record: RequestRecord, computed_tokens: int) -> int:
        """Number of tokens from the start that may be stored: computed, real, and allowed by the user's hints."""
        tokens = min(computed_tokens, record.request.num_tokens)
        if self._limits.prompt_only:
            tokens = min(tokens, record.request.num_prompt_tokens)
        if record.offload_tokens_max is not None:
            tokens = min(tokens, record.offload_tokens_max)
        return tokens

    def due_tokens(self, record: RequestRecord) -> int | None:
        """Number of computed tokens at which the next chunk may be offered; None: no further chunk ever."""
        due = min([(group.next_stored + 1) * group.chunk_tokens for group in record.groups])
        prompt_only = self._limits.prompt_only and due > record.request.num_prompt_tokens
        too_long = record.offload_tokens_max is not None and due > record.offload_tokens_max
        return None if prompt_only or too_long else due

    def final_tokens(self, record: RequestRecord) -> int:
        """Storable tokens when the request ends: the token that was sampled last is not computed (S77)."""
        request = record.request
        real = max(request.num_prompt_tokens, request.num_tokens - 1)
        return self.storable_tokens(record, min(record.computed_tokens, real))

    # -- offering ----------------------------------------------------------------------------------------------------

    def offer_chunks(self, record: RequestRecord, tokens: int, new_tokens: int) -> None:
        """Offer storable chunks within ``tokens``, all or none (S71).

        If there is no room for all of them, they are offered again in the next step. ``new_tokens``: tokens that this
        step computes.
        """
        offered = self._candidates(record, tokens, new_tokens)
        grant = self._grant(offered.keys, offered.end_tokens, record.ctx) if offered.keys else None
        if grant is not None:
            self._accept(record, offered, grant)

    def offer_fitting(self, record: RequestRecord, tokens: int, new_tokens: int = 0) -> bool:
        """Offer storable chunks within ``tokens``, and store those that fit, from the front (S117).

        Returns:
            False if the host tier is full. The cursors stop at the first chunk without room.
        """
        offered = self._candidates(record, tokens, new_tokens)
        return not offered.keys or self._accept_fitting(record, offered)

    def _accept_fitting(self, record: RequestRecord, offered: Candidates) -> bool:
        if len(record.groups) > 1:
            offered = offered.chosen(sorted(range(len(offered.keys)), key=offered.end_tokens.__getitem__))
        taken, grant = self._grant_fitting(offered.keys, offered.end_tokens, record.ctx)
        self._accept(record, offered.part(0, taken), grant)
        return taken == len(offered.keys)

    def offer_remaining(self, record: RequestRecord, new_tokens: int = 0) -> None:
        """Offer all computed chunks of a request that ends: the last opportunity, since its blocks are reused.

        Chunks that find no room are counted as not stored.
        """
        tokens = self.final_tokens(record)
        if record.awaited:
            self._offer_lost_again(record)
        for _ in range(FINAL_PASSES_MAX):
            offered = self._candidates(record, tokens, new_tokens)
            if not offered.keys:
                return
            if not self._accept_fitting(record, offered):
                break
        if skip_useless(record, self._geometry, tokens):
            self._counters.chunks_not_stored += count_storable(record, self._geometry, tokens)
            if record.watcher is not None:
                record.not_stored = candidates(record, self._geometry, tokens, NOT_STORED_MAX).keys

    def _offer_lost_again(self, record: RequestRecord) -> None:
        """Move the store cursors back to the first chunk that a tier was to deliver, and did not."""
        awaited, record.awaited = record.awaited, {}
        found = self._manager.present_prefix([*awaited], 0, len(awaited), record.ctx)
        if found < len(awaited):
            longest = max([group.chunk_tokens for group in record.groups])
            record.offer_again(max(0, min([*awaited.values()][found:]) - longest))

    def offer_free_chunks(self, chunks: Sequence[FreeChunk]) -> int:
        """Offer chunks that no request uses any more. Their blocks are fenced at once.

        Returns:
            Number of chunks, from the front, that found room.
        """
        taken, slots = 0, dict[Key, SlotRef]()
        for hints, alike in groupby(chunks, attrgetter("hints")):
            keys = [chunk.key for chunk in alike]
            ctx = RequestContext(NO_REQUEST, hints=hints)
            # Ends are unknown: free chunks come tail first.
            count, grant = self._grant_fitting(keys, (0,) * len(keys), ctx)
            taken += count
            slots.update(zip(grant.keys, grant.slots, strict=True))
            if count < len(keys):
                break
        first = _first_of_each([chunk.key for chunk in chunks[:taken]], slots)
        granted = sorted([chunks[i] for i in first], key=attrgetter("group"))
        if granted:
            groups = [chunk.group for chunk in granted]
            sizes = tuple(groups.count(group.index) for group in self._geometry.groups)
            ids = tuple(chunk.block_id for chunk in granted)
            sources = SourceBlocks(tuple(range(len(granted))), tuple(groups), ids, sizes, (0,) * len(sizes))
            keys = [chunk.key for chunk in granted]
            self._fences.fence_blocks(self._start(NO_REQUEST, keys, [slots[key] for key in keys], sources))
        for chunk in granted:
            if chunk.request is not None:
                self._block_events.on_store_granted(chunk.request, [Candidate(chunk.key, chunk.group, chunk.number, 0)])
        return taken

    def _candidates(self, record: RequestRecord, tokens: int, new_tokens: int) -> Candidates:
        if record.was_offered(tokens):  # most steps of most requests complete no chunk
            return _NONE
        record.extend_keys(self._geometry)
        if not skip_useless(record, self._geometry, tokens):
            return _NONE
        found = candidates(record, self._geometry, tokens, self._chunks_max(new_tokens))
        if found.keys and not record.continues_prefix:
            record.continues_prefix = True
            for group in record.groups:
                self._manager.continue_prefix(group.keys, group.chunk_tokens, record.ctx)
        return found

    def _grant(self, keys: Sequence[Key], end_tokens: Sequence[int], ctx: RequestContext) -> StoreGrant | None:
        """Slots for chunks that the host tier does not have; None if there is no room for all of them."""
        return self._manager.prepare_store(zip(keys, end_tokens, strict=True), ctx)

    def _grant_fitting(
        self, keys: Sequence[Key], end_tokens: Sequence[int], ctx: RequestContext
    ) -> tuple[int, StoreGrant]:
        """Number of chunks, from the front, that have or got a slot, and the slots that were granted."""
        together = self._grant(keys, end_tokens, ctx) if keys else _NO_GRANT
        if together is not None:
            return len(keys), together
        grants: list[StoreGrant] = []
        taken, size = 0, 1 << len(keys).bit_length()
        while size := size // 2:  # what fits is a sum of powers of two, so each of them is offered once
            part = slice(taken, taken + size)
            if taken + size < len(keys) and (one := self._grant(keys[part], end_tokens[part], ctx)) is not None:
                grants.append(one)
                taken += size
        granted, slots = [key for one in grants for key in one.keys], [slot for one in grants for slot in one.slots]
        reading = frozenset[Key]().union(*[one.reading for one in grants])
        return taken, StoreGrant(tuple(granted), tuple(slots), (), reading)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _accept(self, record: RequestRecord, taken: Candidates, grant: StoreGrant) -> None:
        """Move the cursors past these chunks, and make jobs of the granted ones.

        Several for a long prompt: each one's chunks are written below while the next are copied.
        """
        for index, number in dict(zip(taken.groups, taken.numbers, strict=True)).items():
            group = record.groups[index]  # in each group the chunks ascend, so the last one stays
            group.next_stored = max(group.next_stored, number + 1)
        if grant.reading and len(record.awaited) < AWAITED_MAX:
            ends = zip(taken.keys, taken.end_tokens, strict=True)
            record.awaited.update([(key, end) for key, end in ends if key in grant.reading])
        chunks, slots = _in_groups(taken, grant)
        count, most = len(chunks.keys), self.job_chunks_max
        if count <= most:
            self._start_jobs(record, chunks, slots)
        else:
            for places in batches(range(count), most):
                first, end = places[0], places[-1] + 1
                self._start_jobs(record, chunks.part(first, end), slots[first:end])
        if self._block_events.active:
            self._block_events.on_store_granted(record.request, chunks)

    def _start_jobs(self, record: RequestRecord, chunks: Candidates, slots: Sequence[SlotRef]) -> None:
        """Make one job of chunks of a request, or several where some of their blocks are missing."""
        for sources in source_blocks(record, self._geometry, chunks):
            keys, refs = chunks.keys, slots
            if len(sources.chunks) != len(keys):
                keys, refs = [keys[i] for i in sources.chunks], [refs[i] for i in sources.chunks]
            job = self._start(record.ctx.request_id, keys, refs, sources)
            record.store_jobs.add(job.job_id)
            if self._windowed:  # the engine reuses passed blocks of windows while the request still runs (I3)
                self._fences.fence_blocks(job, blocks_of_groups(job, self._windowed))

    def _start(
        self, request_id: str, keys: Sequence[Key], slots: Sequence[SlotRef], sources: SourceBlocks
    ) -> TransferJob:
        job = TransferJob(
            job_id=self._jobs.new_id(),
            request_id=request_id,
            is_store=True,
            keys=tuple(keys),
            slots=tuple(slots),
            chunk_groups=sources.chunk_groups,
            block_ids=sources.block_ids,
            group_sizes=sources.group_sizes,
            block_indices=sources.block_indices,
        )
        self._jobs.start_job(job)
        self.new_jobs.append(job)
        return job


def _in_groups(taken: Candidates, grant: StoreGrant) -> tuple[Candidates, Sequence[SlotRef]]:
    """The chunks that were granted slots, ordered by group and place, and their slots."""
    if len(grant.keys) == len(taken.keys):  # each chunk has its own, in order: usual
        chosen, slots = taken, grant.slots
    else:
        slot_of = dict(zip(grant.keys, grant.slots, strict=True))
        chosen = taken.chosen(_first_of_each(taken.keys, slot_of))
        slots = tuple([slot_of[key] for key in chosen.keys])
    if len(set(chosen.groups)) <= 1:
        return chosen, slots
    order = sorted(range(len(chosen)), key=lambda i: (chosen.groups[i], chosen.numbers[i]))
    return chosen.chosen(order), [slots[i] for i in order]


def _first_of_each(keys: Sequence[Key], granted: Mapping[Key, SlotRef]) -> list[int]:
    """Index of the first chunk of each key that was granted a slot: equal ones have one slot, to be filled once."""
    first: dict[Key, int] = {}
    for i, key in enumerate(keys):
        if key in granted:
            first.setdefault(key, i)
    return list(first.values())
