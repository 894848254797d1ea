"""What the scheduler remembers of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import StorePolicy
from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.scheduler.requests.request_state import REQUEST_STATES, RequestEvent, RequestState
from tierkv.types.account import RequestAccount
from tierkv.types.engine import Request
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, make_keys, make_scope
from tierkv.types.observation import RequestObservation
from tierkv.types.state_machine import TRANSITIONS_KEPT, TransitionLog


class RequestStats:
    """Fields as in :class:`~tierkv.types.account.RequestAccount`.

    deferred_since_s: since when its lookup waits, or None.
    """

    __slots__ = (
        "deferrals", "deferred_s", "deferred_since_s", "loaded_bytes", "loaded_tokens", "local_tokens", "request_id",
        "shortened_tokens", "stored_tokens",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.local_tokens = 0
        self.loaded_tokens: Counter[str] = Counter()
        self.loaded_bytes: Counter[str] = Counter()
        self.stored_tokens = 0
        self.deferrals = 0
        self.deferred_s = 0.0
        self.deferred_since_s: float | None = None
        self.shortened_tokens = 0

    def as_account(self) -> RequestAccount:
        """As a value that no longer changes."""
        return RequestAccount(
            request_id=self.request_id,
            local_tokens=self.local_tokens,
            loaded_tokens=dict(self.loaded_tokens),
            loaded_bytes=dict(self.loaded_bytes),
            stored_tokens=self.stored_tokens,
            deferrals=self.deferrals,
            deferred_s=self.deferred_s,
            shortened_tokens=self.shortened_tokens,
        )


Watcher = Callable[[str, RequestEvent, RequestState, RequestState], None]
"""Is told of each change: request id, event, state before, state after."""


class GroupRecord:
    """One request in one group.

    keys, block_ids: of its chunks and GPU blocks, in order. next_stored: the first chunk not yet offered for storing.
    hit_chunks: whole chunks that were there already when the request was answered, on the GPU or to be loaded.
    """

    __slots__ = ("block_ids", "chunk_tokens", "hit_chunks", "keys", "next_stored", "window_chunks")

    def __init__(self, geometry: GroupGeometry) -> None:
        self.chunk_tokens = geometry.chunk_tokens
        self.window_chunks = geometry.window_chunks
        self.keys: list[Key] = []
        self.block_ids: list[int] = []
        self.next_stored = 0
        self.hit_chunks = 0

    def useful_keys(self, computed_tokens: int) -> list[Key]:
        """The chunks that were of use to this request, or will be to one like it (S53).

        All of them with full attention. Of a window, those that the hit needed, and everything computed since.
        """
        start = 0 if self.window_chunks is None else max(0, self.hit_chunks - self.window_chunks)
        return self.keys[start : computed_tokens // self.chunk_tokens]


class RequestRecord:
    """One request over all groups. Invariant I1: its jobs are one load, or stores, or none."""

    def __init__(
        self, request: Request, geometry: Geometry, hints: RequestHints = NO_HINTS, stats: RequestStats | None = None
    ) -> None:
        self.request = request
        self.ctx = RequestContext(request.request_id, _mapping(request.kv_transfer_params), hints)
        self.state = RequestState.IDLE
        self.watcher: Watcher | None = None
        self.transitions: TransitionLog[RequestEvent, RequestState] = TransitionLog(maxlen=TRANSITIONS_KEPT)
        self.groups = [GroupRecord(group) for group in geometry.groups]
        self._scope = scope_of(request)
        self.search_groups = _search_groups(self.groups, geometry)
        self._windows = geometry.has_windows
        self.load_job: int | None = None
        self.streaming = False  # its load is one of several jobs; between two of them none is in flight
        self.store_jobs: set[int] = set()
        self.computed_tokens = 0
        self.tokens_unconfirmed = 0  # computed in its last step; where only what is certain is stored
        self.stats = RequestStats(request.request_id) if stats is None else stats
        self.arrival: RequestObservation | None = None
        self.has_arrived = False
        self.store_policy = StorePolicy.BLOCK_LEVEL
        self.held_for_stores = False  # finished; its engine keeps its blocks until its stores have ended
        self.offload_tokens_max = hints.max_offload_tokens if hints.stores else 0
        # The lookup in progress: since when it is deferred, what it was about, and what it found.
        self.asked_since_s: float | None = None
        self.asked_at_s = 0.0
        self.asked_about: tuple[int, ...] | None = None
        self.asked_version = -1
        self.shortened_about: tuple[int, ...] | None = None
        self.hit_tokens = 0
        self.wanted: tuple[Key, ...] = ()
        self.gathered: tuple[Key, ...] = ()  # of the wanted chunks, those that are brought together before the answer
        self.asked_whole = False

    def apply(self, event: RequestEvent) -> None:
        """Move to the state after ``event``.

        Raises:
            IllegalTransitionError: the request cannot do that now.
        """
        before = self.state
        self.state = REQUEST_STATES.next(before, event, self.ctx.request_id, self.transitions.describe)
        self.transitions.append((event, self.state))
        if self.watcher is not None:
            self.watcher(self.ctx.request_id, event, before, self.state)

    def extend_keys(self, geometry: Geometry) -> None:
        """Add the keys of chunks whose hashes have become known (S3, S4)."""
        hashes = self.request.block_hashes
        for record, group in zip(self.groups, geometry.groups, strict=True):
            per_chunk = group.hashes_per_chunk
            first = per_chunk * (len(record.keys) + 1) - 1
            if first < len(hashes):
                record.keys += make_keys(hashes[first::per_chunk], group.index, self._scope)

    @property
    def hit_end_max(self) -> int:
        """The last token at which a hit may end.

        The engine computes the last token of a prompt in any case, to have something to sample from. Where a group has
        a window the hit ends before that token: else the window would have to end one token earlier than it does.
        """
        return self.request.num_tokens - self._windows

    def note_hit(self, tokens: int) -> None:
        """The request was answered: its first ``tokens`` tokens are local or can be loaded (S15)."""
        for group in self.groups:
            group.hit_chunks = tokens // group.chunk_tokens

    def replace_blocks(self, block_ids: tuple[tuple[int, ...], ...], *, whole_table: bool) -> None:
        """Take over block ids that the engine scheduled, one entry per group."""
        for record, ids in zip(self.groups, block_ids, strict=True):
            if whole_table:
                record.block_ids = list(ids)
            else:
                record.block_ids.extend(ids)

    def end_lookup(self) -> None:
        """Forget the lookup in progress."""
        self.asked_since_s = None
        self.asked_about = None
        self.hit_tokens = 0
        self.wanted = self.gathered = ()

    @property
    def will_stream(self) -> bool:
        """Whether the hit is longer than what was gathered of it."""
        return len(self.gathered) < len(self.wanted)

    def was_offered(self, tokens: int) -> bool:
        """Whether every chunk that ends within ``tokens`` was offered for storing, or is of no use to store."""
        for group in self.groups:  # noqa: SIM110 - asked in every step of every request: all() takes three times as long
            if (group.next_stored + 1) * group.chunk_tokens <= tokens:
                return False
        return True

    def offer_again(self, tokens: int = 0) -> None:
        """Offer all chunks behind the first ``tokens`` again; those that are present will be filtered out.

        Some that were thought to be stored may not be: a load of them failed, or the cache was emptied (S91).
        """
        for group in self.groups:
            group.next_stored = min(group.next_stored, tokens // group.chunk_tokens)

    def skip_loaded(self, tokens: int) -> None:
        """Chunks that cover the first ``tokens`` came from a tier: they are not offered for storing."""
        for group in self.groups:
            group.next_stored = max(group.next_stored, -(-tokens // group.chunk_tokens))

    @property
    def has_jobs(self) -> bool:
        """Whether a transfer of this request is in flight, or the next one of its load is being prepared."""
        return self.is_loading or bool(self.store_jobs)

    @property
    def is_loading(self) -> bool:
        """Whether its load has not ended."""
        return self.streaming or self.load_job is not None


def scope_of(request: Request) -> bytes:
    """What keeps the request's chunks apart from others': its salt and its adapter, where the engine tells them."""
    said = (getattr(request, "cache_salt", None), getattr(request, "lora_name", None))
    salt, adapter = (None if text is None else str(text) for text in said)
    return make_scope(salt, adapter)


def _mapping(params: object) -> Mapping[str, Any]:
    """What the engine's user attached; nothing, where it is not what it should be (the hints' reader tells that)."""
    return params if isinstance(params, Mapping) else {}


def _search_groups(groups: Sequence[GroupRecord], geometry: Geometry) -> tuple[SearchGroup, ...]:
    """The groups as the search wants them, in lookup order. Their lists of keys are the records' own, and grow."""
    return tuple(
        SearchGroup(
            groups[i].chunk_tokens, groups[i].keys, geometry.groups[i].window_chunks, geometry.groups[i].end_slack
        )
        for i in geometry.lookup_order
    )
