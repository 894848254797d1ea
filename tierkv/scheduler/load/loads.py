"""Loads, from the allocation of their blocks until their last job has ended. Sans-IO.

A hit that was gathered whole is loaded by one job, or by several if it has more chunks than one call may send. Of a
longer hit, the gathered part is sent as the first *segment*: a job that does not end the load. From then on the load
streams: the next chunks are gathered while a segment is copied, and are sent when that copy has ended. Each chunk is
read once, whatever the size of the host tier. See
docs/explanation/long-prefixes.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tierkv.errors import require
from tierkv.manager.manager import OffloadManager
from tierkv.manager.passages.passage import Passage
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.jobs.jobs import JobStatus, JobTable
from tierkv.scheduler.limits import SchedulerLimits, StorePolicy
from tierkv.scheduler.load.load_plan import LoadPlan, plan_load
from tierkv.scheduler.load.stream import Stream
from tierkv.scheduler.load.stream_state import StreamState
from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.requests.accounting import Accounting
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.scheduler.requests.rules import refused
from tierkv.types.engine import BlockTables
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ChunksInBlocks, SlotRef, TransferJob


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """Load whose last job has ended."""

    transfer: ChunksInBlocks
    """Its chunks and blocks."""
    failed: AbstractSet[Key]
    """Chunks that were not loaded."""
    stale: bool
    """The cache was reset since the load began."""
    good_tokens: int = 0
    """Number of valid tokens from the front, if some chunks failed."""
    has_blocks: bool = True
    """Whether its blocks still belong to the request."""


class Loads:
    """All loads in flight. Shares jobs, lookups and accounting with the scheduler.

    A stream that is late (:meth:`~tierkv.manager.passages.passages.Passages.is_late`) is cut where its chunks are
    missing.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the scheduler hands in its parts
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        jobs: JobTable,
        lookups: Lookups,
        in_flight: LoadsInFlight,
        accounting: Accounting,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._counters = counters
        self._jobs = jobs
        self._lookups = lookups
        self._in_flight = in_flight
        self._accounting = accounting
        self._chunks_max = manager.budget.looks_max  # of a job
        self._new: list[TransferJob] = []
        self._written: list[int] = []  # blocks that will be written
        self._streams: dict[str, Stream] = {}

    @property
    def has_new_jobs(self) -> bool:
        """Whether jobs wait to be handed to workers."""
        return bool(self._new)

    @property
    def has_streams(self) -> bool:
        """Whether any load streams."""
        return bool(self._streams)

    def take_jobs(self) -> tuple[TransferJob, ...]:
        """Jobs made since the previous call."""
        jobs, self._new = tuple(self._new), []
        return jobs

    def take_written(self) -> list[int]:
        """Blocks that loads will write, as far as has become known since the previous call."""
        written, self._written = self._written, []
        return written

    # -- beginning ---------------------------------------------------------------------------------------------------

    def start_load(self, record: RequestRecord, blocks: BlockTables, external_tokens: int) -> None:
        """Load the offered chunks into the allocated blocks.

        Raises:
            EngineProtocolError: the tables cannot take them, or a chunk is neither held nor readable; nothing was
                changed.
        """
        local_tokens = record.computed_tokens
        try:
            plan = plan_load(record, self._geometry, blocks, local_tokens, external_tokens, self._chunks_max)
        except (AttributeError, TypeError) as error:
            raise refused(record.ctx.request_id, f", block tables: {error}") from error
        end = local_tokens + external_tokens
        self._lookups.renew_gathered(record)
        gathered = self._gathered_keys(record, plan)
        if len(gathered) < len(plan.keys) or len(gathered) > self._chunks_max:
            self._start_stream(record, plan, gathered, end)
        else:
            grant = self._manager.prepare_load(plan.keys, record.ctx)
            self._accounting.note_load(
                record.stats, plan, record.sources(plan.keys, grant.sources), record.computed_tokens, end
            )
            self._send(record, plan.job(self._jobs.new_id(), record.ctx.request_id, grant.slots))
        if not plan.reads_late:
            self._written += plan.block_ids
        self._accounting.note_start(record.request.num_tokens, local_tokens, external_tokens)
        self._lookups.close_lookup(record)
        record.apply(RequestEvent.LOAD_STARTED)
        self._in_flight.started(record.ctx.request_id, plan.keys, self._lookups.now_s)
        if record.store_policy is StorePolicy.BLOCK_LEVEL:  # loaded chunks are in a tier already
            record.skip_loaded(end)

    @staticmethod
    def _gathered_keys(record: RequestRecord, plan: LoadPlan) -> tuple[Key, ...]:
        """Chunks of the plan that were gathered for the offer."""
        if not record.lookup.will_stream:
            return plan.keys
        return tuple(filter(set(record.lookup.gathered).__contains__, plan.keys))

    def _start_stream(self, record: RequestRecord, plan: LoadPlan, gathered: tuple[Key, ...], end: int) -> None:
        """Start a load in several jobs. If one call may not send what was gathered, :meth:`make_due_jobs` does."""
        manager, ctx, held = self._manager, record.ctx, record.lookup.gathered
        if len(plan.keys) < len(record.lookup.wanted):  # the engine takes less than it was offered
            held = tuple(filter(set(gathered).__contains__, held))
            passage, in_plan = manager.passages.get(ctx.request_id), set(plan.keys)
            if passage is not None:
                manager.passages.shrink(ctx.request_id, tuple(filter(in_plan.__contains__, passage.keys)))
        if len(held) > self._chunks_max:
            manager.passages.begin_to_copy(ctx.request_id)
            grant = None
        else:
            grant = manager.prepare_load(held, ctx, continues=True)  # empty if the engine has computed all of it since
        start = record.computed_tokens
        stream = Stream(record, plan, self._geometry, start, end, checked_chunks=self._chunks_max)
        self._streams[ctx.request_id] = stream
        record.streaming = True
        self._counters.loads_streamed += 1
        if grant is not None and held:
            self._send_segment(stream, held, grant.slots, grant.sources)

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Let tiers read on: streams take the slots that became free before this step's stores do."""
        if self._in_flight.waiting:
            self._in_flight.begin_step()
        if self._streams:
            self._gather_streams()

    def check_blocks(self) -> None:
        """Check the blocks that the next jobs will fill, as far as they were not read when their loads began.

        Raises:
            EngineProtocolError: one of them is the null block; names the request. Nothing has changed then.
        """
        for stream in self._streams.values():
            if stream.plan.reads_late:
                stream.check_blocks(min(len(stream.segment), self._chunks_max))

    def make_due_jobs(self) -> None:
        """Make the jobs that are due."""
        self._weigh_again()
        for stream in list(self._streams.values()):
            if stream.is_sent:
                continue
            passage = self._gather_segment(stream)
            if stream.state is StreamState.GATHERING or self._is_rest_ready(stream, passage):
                self._send_arrived(stream, passage)
            if not stream.is_sent:
                self._gather_segment(stream)

    def _weigh_again(self) -> None:
        """Cut a stream from where its chunks have come to be read slower than computed. One in a step."""
        choice = self._lookups.choice
        for stream in self._streams.values():
            if stream.is_sent or not choice.has_changed(stream.record) or (start := stream.next_token) is None:
                continue
            end = choice.end_of_load(stream.record, stream.start, start, stream.end)
            if end < stream.end:
                stream.cut_at_token(end)
                self._drop_void_chunks(stream)
            return

    def _gather_segment(self, stream: Stream) -> Passage | None:
        """Gather the next segment of a stream. Returns its passage; None: no chunk is pending."""
        passage = self._reserve_segment(stream)
        if passage is None or not passage.failed:
            return passage
        passages, ctx = self._manager.passages, stream.record.ctx
        lost = [key for key in stream.segment if passages.is_lost(key, ctx)]
        if lost:
            return self._cut_stream(stream, lost)
        return self._reserve_segment(stream)  # another tier has the chunks that failed here

    def _reserve_segment(self, stream: Stream) -> Passage | None:
        passages, ctx = self._manager.passages, stream.record.ctx
        if not stream.segment:
            held = passages.get(ctx.request_id)  # behind those that were sent, if they were gathered together
            stream.segment = (held and held.keys) or stream.next_keys(passages.segment_chunks_max)
        if not stream.segment:
            return None
        return passages.reserve(ctx.request_id, stream.segment, ctx.hints)

    def _send_arrived(self, stream: Stream, passage: Passage | None) -> None:
        """Send the segment, or the front of it that has arrived.

        A segment that is late is cut first.
        """
        if passage is not None and not self._arrived_chunks(stream, passage) and self._is_late(passage):
            passage = self._cut_stream(stream, [self._first_missing(stream, passage)])
        if passage is None:
            self._send_segment(stream)
        elif front := self._arrived_chunks(stream, passage):
            # Of too many, half as many as a job may have: to keep those behind held costs this call something, too.
            keys = passage.keys[: front if front <= self._chunks_max else max(1, self._chunks_max // 2)]
            keys = keys[: stream.num_checked]
            if not keys:
                return  # the next step checks their blocks
            grant = self._manager.prepare_load(keys, stream.record.ctx, continues=True)
            self._send_segment(stream, keys, grant.slots, grant.sources)

    def _is_rest_ready(self, stream: Stream, passage: Passage | None) -> bool:
        """Whether one job can send all that is left. Then it need not wait for the one in flight: no other follows.

        It is also ready where no chunk is left, and the last job only names the void ones.
        """
        if passage is None:
            return not stream.num_pending
        sends_all = stream.num_pending == len(passage.keys) <= min(self._chunks_max, stream.num_checked)
        return passage.ready and sends_all

    @staticmethod
    def _front_chunks(passage: Passage) -> int:
        """Number of chunks of the segment, from the front, that have their slots."""
        return len(passage.keys) if passage.complete else passage.position

    def _arrived_chunks(self, stream: Stream, passage: Passage) -> int:
        """Number of chunks of the segment, from the front, to send now: those with slots, if none is in flight.

        Behind the last segment nothing is read while it is copied: of that one, a large front is sent ahead.
        """
        if passage.failed:
            return 0
        if passage.outstanding:
            return passage.early_front if stream.num_pending == len(passage.keys) else 0
        return self._front_chunks(passage)

    def _first_missing(self, stream: Stream, passage: Passage) -> Key:
        """First chunk of the segment that has not arrived."""
        is_readable, front = self._manager.passages.is_readable, self._front_chunks(passage)
        missing = (key for i, key in enumerate(stream.segment) if i >= front or not is_readable(key))
        return next(missing, stream.segment[0])

    def _is_late(self, passage: Passage) -> bool:
        return self._manager.passages.is_late(passage.owner, self._limits.lookup_deadline_s)

    def _cut_stream(self, stream: Stream, lost: Iterable[Key]) -> Passage | None:
        """Cut the stream at these lost chunks, and continue with those before them."""
        stream.cut_at(list(lost))
        return self._drop_void_chunks(stream)

    def _drop_void_chunks(self, stream: Stream) -> Passage | None:
        """After a cut: release void chunks of the segment, and continue with the rest."""
        coming = set(stream.next_keys(len(stream.segment)))
        stream.segment = tuple([key for key in stream.segment if key in coming])
        if not stream.segment:
            self._manager.passages.shrink(stream.record.ctx.request_id, ())
        return self._reserve_segment(stream)

    def _send_segment(
        self, stream: Stream, keys: tuple[Key, ...] = (), slots: tuple[SlotRef, ...] = (), sources: tuple[str, ...] = ()
    ) -> None:
        """Send a job with these chunks; without chunks, the last job, which only names the void ones."""
        record = stream.record
        positions = stream.find(keys)
        groups, tokens = stream.groups_and_tokens(positions)
        job = stream.make_job(self._jobs.new_id(), positions, slots)
        if stream.plan.reads_late:
            self._written += job.block_ids
        self._accounting.note_chunks(record.stats, groups, tokens, record.sources(keys, sources))
        self._send(record, job)
        if job.ends_load and stream.is_cut:
            self._counters.loads_given_up += 1
            self._counters.tokens_given_up += stream.void_tokens
            self._counters.tokens_computed += stream.void_tokens

    def _send(self, record: RequestRecord, job: TransferJob) -> None:
        record.load_job = job.job_id
        self._in_flight.moved(job.request_id, self._lookups.now_s)
        self._jobs.start_job(job)
        self._new.append(job)

    # -- completion ----------------------------------------------------------------------------------------------------

    def end_job(self, status: JobStatus) -> EndedLoad | None:
        """End a load job whose slots are free. Returns the load if it has ended with this job."""
        job = status.job
        stream = self._streams.get(job.request_id)
        if stream is None:
            if not status.stale:
                self._in_flight.ended(job.request_id, job.keys)
            return EndedLoad(job, status.failed, status.stale)
        record = stream.record
        if record.load_job == job.job_id:
            record.load_job = None
        stream.end_job(job.job_id, status.failed)
        self._in_flight.moved(job.request_id, self._lookups.now_s)
        if not stream.is_over:
            if status.failed and not stream.is_sent:
                stream.cut_at(status.failed)
                self._drop_void_chunks(stream)
            self._gather_streams()
            return None
        del self._streams[job.request_id]
        record.streaming = False
        self._manager.passages.release(job.request_id)
        if not stream.stale:
            self._in_flight.ended(job.request_id, stream.plan.keys)
        has_blocks = record.state is not RequestState.FINISHED
        self._gather_streams()
        return EndedLoad(stream.plan, stream.failed, stream.stale, stream.good_tokens, has_blocks)

    def _gather_streams(self) -> None:
        """Gather for all streams: slots have become free, so that tiers can read before the next step."""
        for stream in self._streams.values():
            if not stream.is_sent:
                self._gather_segment(stream)

    def stop_load(self, record: RequestRecord) -> None:
        """End the load of a request that has finished: read nothing more; jobs in flight run to their end."""
        stream = self._streams.get(record.ctx.request_id)
        if stream is not None:
            stream.cut_short()
            self._drop_void_chunks(stream)

    def reset(self) -> None:
        """Void all streams after a reset of the cache: read nothing more, and let none of their chunks count."""
        for stream in self._streams.values():
            stream.stale = True
            stream.cut_short()
            self._drop_void_chunks(stream)

    # -- check -------------------------------------------------------------------------------------------------------

    def jobs_of(self, record: RequestRecord) -> AbstractSet[int]:
        """Ids of the jobs in flight of a request's load."""
        stream = self._streams.get(record.ctx.request_id)
        if stream is not None:
            return stream.jobs
        return set() if record.load_job is None else {record.load_job}

    def validate(self) -> None:
        """Check every stream against its request.

        Raises:
            InvariantError: they do not agree.
        """
        for request_id, stream in self._streams.items():
            stream.validate()
            record = stream.record
            require(record.streaming, f"request {request_id!r} is not marked as streaming")
            at_hand = record.load_job is None or record.load_job in stream.jobs
            require(at_hand, f"request {request_id!r} has a load job in flight that does not belong to its stream")
