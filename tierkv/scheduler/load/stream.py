"""Stream: one load in several jobs, its chunks sent, pending and void. Sans-IO.

Chunks are wanted in the order in which they end, except for those gathered before the stream began. A chunk that fails
*cuts* the stream: chunks that begin at or behind it become *void*, because the engine computes from there in any case.
The chunks before it are still loaded. The last job names the void chunks beside those that it copies, if any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from typing import TypeVar

from tierkv.errors import require
from tierkv.scheduler.load.load_plan import ChunksOfPlan, LoadPlan, tokens_of_chunks
from tierkv.scheduler.load.stream_state import STREAM_STATES, StreamEvent, StreamState
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.rules import refused
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.state_machine import TRANSITIONS_KEPT, TransitionLog
from tierkv.types.transfers import VOID_SLOT, SlotRef, TransferJob

_T = TypeVar("_T")


def _at(column: Sequence[_T], positions: Sequence[int]) -> tuple[_T, ...]:
    """Entries at these positions."""
    if isinstance(positions, range):  # mostly, and then without a step of the interpreter for each
        return tuple(column[positions.start : positions.stop])
    return tuple([column[i] for i in positions])


class Stream:
    """One load that streams.

    Attributes:
        record: its request.
        plan: all of its chunks and their blocks.
        state: see :mod:`~tierkv.scheduler.load.stream_state`.
        segment: chunks that are being gathered, in the order in which they are wanted.
        jobs: ids of its jobs in flight.
        failed: chunks that were not loaded.
        stale: the cache was reset since the load began: none of it counts.
        start, end: first token that it loads, and the one behind the last.
        num_checked: number of pending chunks, from the front, whose blocks were checked: only these may be sent.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a load, its place, and how much of it was checked
        self, record: RequestRecord, plan: LoadPlan, geometry: Geometry, start: int, end: int, checked_chunks: int
    ) -> None:
        self.record = record
        self.plan = plan
        self.state = StreamState.GATHERING
        self.segment: tuple[Key, ...] = ()
        self.jobs: set[int] = set()
        self.failed: set[Key] = set()
        self.stale = False
        self.num_checked = checked_chunks if plan.reads_late else len(plan.keys)
        self.start = start
        self.end = end
        self._chunks = ChunksOfPlan(plan, geometry)
        self._whole_only = geometry.has_windows
        self._tokens = tokens_of_chunks(plan, geometry, start, end)
        self._pending = self._chunks.in_order()
        self._void: list[int] = []
        self._last_job: int | None = None
        self._transitions: TransitionLog[StreamEvent, StreamState] = TransitionLog(maxlen=TRANSITIONS_KEPT)

    @property
    def is_over(self) -> bool:
        """Whether the last job was sent, and every job has ended."""
        return self.state is StreamState.ENDED

    @property
    def is_sent(self) -> bool:
        """Whether the last job was sent."""
        return self._last_job is not None

    @property
    def num_pending(self) -> int:
        """Number of chunks that were not sent and may still arrive."""
        return len(self._pending)

    @property
    def is_cut(self) -> bool:
        """Whether some chunks are void."""
        return bool(self._void)

    @property
    def void_tokens(self) -> int:
        """Number of tokens that the load will not bring."""
        return sum(self._tokens[i] for i in self._void)

    @property
    def good_tokens(self) -> int:
        """Number of tokens, from the front, that are valid after a load with failed chunks."""
        if self._whole_only or self.stale:
            return 0
        return self._first_token(self.failed) if self.failed else 0

    def next_keys(self, count: int) -> tuple[Key, ...]:
        """First ``count`` pending chunks."""
        return _at(self.plan.keys, self._pending[:count])

    def find(self, keys: tuple[Key, ...]) -> Sequence[int]:
        """Positions in the plan of pending chunks. They are looked for from the front, where most are."""
        front, in_plan = self._pending[: len(keys)], self.plan.keys
        if keys == _at(in_plan, front):
            return front
        missing, position = set(keys), dict[Key, int]()
        for i in self._pending:
            if (key := in_plan[i]) in missing:
                position[key] = i
                if len(position) == len(missing):
                    break
        return [position[key] for key in keys]

    def check_blocks(self, count: int) -> None:
        """Check the blocks of the first ``count`` pending chunks, as far as they were not checked before.

        Raises:
            EngineProtocolError: one of them is the null block.
        """
        null = self._chunks.find_null(self._pending[self.num_checked : count])
        if null is not None:
            why = f": block {null} of its load is the null block, which is shared: give each token a block of its own"
            raise refused(self.record.ctx.request_id, why)
        self.num_checked = max(self.num_checked, min(count, len(self._pending)))

    def _first_token(self, keys: AbstractSet[Key]) -> int:
        """First token of these chunks."""
        return min(start for key, start in zip(self.plan.keys, self._chunks.starts, strict=True) if key in keys)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def groups_and_tokens(self, positions: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Group of each chunk, and the number of tokens that it represents."""
        return _at(self.plan.chunk_groups, positions), _at(self._tokens, positions)

    def make_job(self, job_id: int, positions: Sequence[int], slots: Sequence[SlotRef]) -> TransferJob:
        """Job with the chunks at these positions of the plan.

        If no chunk is pending after it, it is the last job, and also names the void chunks.
        """
        count = len(positions)
        front, behind = self._pending[:count], self._pending[count:]
        if positions != front and {*positions} != {*front}:  # the first segment may not be the front of what is pending
            sent = {*positions}
            behind = [i for i in self._pending if i not in sent]
        self._pending = behind
        self.num_checked = max(0, self.num_checked - count)
        self.jobs.add(job_id)
        ends = not behind
        if ends:
            positions, slots = [*positions, *self._void], [*slots, *repeat(VOID_SLOT, len(self._void))]
            self.failed.update(self.plan.keys[i] for i in self._void)
            self._last_job = job_id
        if not isinstance(positions, range):
            refs = dict(zip(positions, slots, strict=True))
            positions = sorted(refs)
            slots = [refs[i] for i in positions]
        self.segment = ()
        self._apply(StreamEvent.LAST_SENT if ends else StreamEvent.SEGMENT_SENT)
        part = self._chunks.part(positions)
        return part.job(job_id, self.record.ctx.request_id, tuple(slots), ends_load=ends)

    def end_job(self, job_id: int, failed: AbstractSet[Key]) -> None:
        """End one of its jobs."""
        self.jobs.discard(job_id)
        self.failed |= failed
        if job_id != self._last_job:
            self._apply(StreamEvent.SEGMENT_ENDED)
        if self.is_sent and not self.jobs:
            self._apply(StreamEvent.LAST_ENDED)

    # -- cuts --------------------------------------------------------------------------------------------------------

    def cut_at(self, lost: Collection[Key]) -> None:
        """Cut the stream at the first of these lost chunks; where a group has a window, void all pending chunks."""
        if self._whole_only:
            self.cut_short()
        else:
            self.cut_at_token(self._first_token({*lost}))

    @property
    def next_token(self) -> int | None:
        """First token of the pending chunks, O(pending); None if there are none."""
        starts = self._chunks.starts
        return min(starts[i] for i in self._pending) if self._pending else None

    def cut_short(self) -> None:
        """Void all pending chunks."""
        self.cut_at_token(0)

    def cut_at_token(self, token: int) -> None:
        """Void the pending chunks that begin at a token or behind it."""
        starts = self._chunks.starts
        self._void += [i for i in self._pending if starts[i] >= token]
        self._pending = [i for i in self._pending if starts[i] < token]

    # -- state -------------------------------------------------------------------------------------------------------

    def _apply(self, event: StreamEvent) -> None:
        self.state = STREAM_STATES.next(self.state, event, self.record.ctx.request_id, self._transitions.describe)
        self._transitions.append((event, self.state))

    def validate(self) -> None:
        """Check that jobs and state agree, and that no chunk is both pending and void.

        Raises:
            InvariantError: they do not agree.
        """
        what = f"the load of request {self.record.ctx.request_id!r} ({self.state.value})"
        require(bool(self.jobs) == (self.state is not StreamState.GATHERING), f"{what} has {len(self.jobs)} jobs")
        require(self.is_sent == (self.state is StreamState.ENDING), f"{what}: its last job and its state disagree")
        require(set(self._pending).isdisjoint(self._void), f"{what} has a chunk that is both pending and void")
        coming = {self.plan.keys[i] for i in self._pending}
        require(coming.issuperset(self.segment), f"{what} gathers a chunk that is not pending")
