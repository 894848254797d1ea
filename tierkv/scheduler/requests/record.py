"""Request record: keys, tables, open lookup, jobs and statistics of one request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tierkv.manager.contract import RequestContext
from tierkv.manager.step_budget import BudgetShare
from tierkv.scheduler.limits import StorePolicy
from tierkv.scheduler.lookup.open_lookup import OpenLookup
from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.scheduler.requests.request_state import REQUEST_STATES, RequestEvent, RequestState
from tierkv.types.account import RequestAccount
from tierkv.types.engine import Request
from tierkv.types.geometry import Geometry, GroupGeometry, batches, cdiv
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, make_keys, make_scope
from tierkv.types.observation import RequestObservation
from tierkv.types.state_machine import TRANSITIONS_KEPT, TransitionLog

KEYS_MADE_PER_KEY = 32
"""Keys of chunks that are made for the cost of one key operation."""

KEYS_TOGETHER = 256
"""Keys that are made together where they are taken one by one."""


class RequestStats:
    """Running totals, as in :class:`~tierkv.types.account.RequestAccount`.

    Attributes:
        deferred_since_s: time at which the open lookup was first deferred, on the stack's clock; None: not deferred.
    """

    __slots__ = (
        "deferrals", "deferred_s", "deferred_since_s", "deferred_tier_s", "loaded_bytes", "loaded_tokens",
        "local_tokens", "request_id", "shortened_tokens", "stored_tokens",
    )  # fmt: skip

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.local_tokens = 0
        self.loaded_tokens: dict[str, int] = {}  # no Counter: one is made per request, and most load nothing
        self.loaded_bytes: dict[str, int] = {}
        self.stored_tokens = 0
        self.deferrals = 0
        self.deferred_s = 0.0
        self.deferred_tier_s = 0.0
        self.deferred_since_s: float | None = None
        self.shortened_tokens = 0

    def as_account(self) -> RequestAccount:
        """Immutable copy."""
        return RequestAccount(
            request_id=self.request_id,
            local_tokens=self.local_tokens,
            loaded_tokens=dict(self.loaded_tokens),
            loaded_bytes=dict(self.loaded_bytes),
            stored_tokens=self.stored_tokens,
            deferrals=self.deferrals,
            deferred_s=self.deferred_s,
            deferred_tier_s=self.deferred_tier_s,
            shortened_tokens=self.shortened_tokens,
        )


Watcher = Callable[[str, RequestEvent, RequestState, RequestState], None]
"""Called for each state change with (request id, event, previous state, new state)."""


class GroupRecord:
    """One request in one group.

    Attributes:
        keys: of its whole chunks, in order.
        block_ids: of its GPU blocks, in order.
        next_stored: store cursor: the first chunk not yet offered for storing.
        hit_chunks: whole chunks that were on the GPU or could be loaded when the request was answered.
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
        """Chunks that this request used, or that a similar one will use (S53).

        With full attention all of them. With a window, those that the hit needed, and everything computed since.
        """
        start = 0 if self.window_chunks is None else max(0, self.hit_chunks - self.window_chunks)
        return self.keys[start : computed_tokens // self.chunk_tokens]


class RequestRecord:
    """One request over all groups. Invariant I1: its jobs in flight are one load, or stores, or none.

    Attributes:
        request: as the engine registered it.
        ctx: its id, parameters and hints, as the manager needs them.
        state: changed by :meth:`apply` only.
        watcher: called for each state change; None: no watcher.
        transitions: latest state changes, for error messages.
        groups: keys, blocks and store cursor per group.
        search_groups: the same groups for the search, in lookup order.
        load_job: id of its load job in flight.
        streaming: its load has several jobs; between two of them none is in flight.
        store_jobs: ids of its store jobs in flight.
        checked_hashes: hashes of the request that were checked.
        hashes_checked_so_far: these hashes, while others that became known with them are not checked.
        computed_tokens: tokens with computed KV; during a lookup, those in the engine's own cache.
        quiet_tokens: while it has fewer tokens than this and gets no block, a step only counts them.
        unconfirmed_tokens: tokens of its latest step, which may still be rejected; used by the eager store plan.
        prefill_tokens: prompt tokens that the engine is still to compute, as its latest lookup leaves them.
        stats: its running totals.
        arrival: observation of its arrival, if policies want observations.
        has_arrived: whether its first lookup was answered.
        continues_prefix: whether the tiers know which of its chunks were there before it stored any, since its latest
            lookup: another request may have continued them meanwhile.
        awaited: chunks that were offered while a tier was read for them, each with the token at which it ends.
        not_stored: if it is watched, its first chunks that the host tier had not taken when it ended.
        store_policy: whether loaded chunks are offered for storing again.
        resets: number of resets of the cache that its store cursors know of.
        held_for_stores: it has finished, and the engine keeps its blocks until its stores have ended.
        is_dropped: it has finished here, and the engine goes on with it.
        offload_tokens_max: tokens from the start that may be stored; None: all.
        lookup: its lookup, open or not.
        read_ahead: chunks that were read for it before the engine asked, each with its tier.
        loaded_ahead: those of them that its latest answer offers.
    """

    def __init__(
        self,
        request: Request,
        geometry: Geometry,
        hints: RequestHints = NO_HINTS,
        stats: RequestStats | None = None,
        number: int = 0,
    ) -> None:
        self.request = request
        self.ctx = RequestContext(request.request_id, _mapping(request.kv_transfer_params), hints, number=number)
        self.state = RequestState.IDLE
        self.watcher: Watcher | None = None
        self.transitions: TransitionLog[RequestEvent, RequestState] = TransitionLog(maxlen=TRANSITIONS_KEPT)
        self.groups = [GroupRecord(group) for group in geometry.groups]
        self.checked_hashes = 0
        self.hashes_checked_so_far: set[object] = set()
        self._scope = scope_of(request)
        self.search_groups = _search_groups(self.groups, geometry)
        self._windows = geometry.has_windows
        self.load_job: int | None = None
        self.streaming = False
        self.store_jobs: set[int] = set()
        self.computed_tokens = 0
        self.unconfirmed_tokens = 0
        self.quiet_tokens = self.prefill_tokens = 0
        self.stats = RequestStats(request.request_id) if stats is None else stats
        self.arrival: RequestObservation | None = None
        self.has_arrived = False
        self.continues_prefix = False
        self.awaited: dict[Key, int] = {}
        self.not_stored: Sequence[Key] = ()
        self.store_policy = StorePolicy.BLOCK_LEVEL
        self.resets = 0
        self.held_for_stores = False
        self.is_dropped = False
        self.offload_tokens_max = hints.max_offload_tokens if hints.stores else 0
        self.lookup = OpenLookup()
        self.read_ahead: dict[Key, str] = {}
        self.loaded_ahead: dict[Key, str] = {}

    def apply(self, event: RequestEvent) -> None:
        """Move to the state after ``event``.

        Raises:
            IllegalTransitionError: the event is not allowed in this state.
        """
        before, self.quiet_tokens = self.state, 0
        self.state = REQUEST_STATES.next(before, event, self.ctx.request_id, self.transitions.describe)
        self.transitions.append((event, self.state))
        if self.watcher is not None:
            self.watcher(self.ctx.request_id, event, before, self.state)

    def extend_keys(self, geometry: Geometry, share: BudgetShare | None = None) -> bool:
        """Append the keys of chunks whose hashes have become known (S3, S4), and are checked if any is.

        share: pays for them, and leaves those that it cannot pay for to a later call; None: all are appended. Returns
        whether no key is left to append.
        """
        hashes = self.request.block_hashes
        known = self.checked_hashes if self.hashes_checked_so_far else len(hashes)
        for record, group in zip(self.groups, geometry.groups, strict=True):
            per_chunk = group.hashes_per_chunk
            made = len(record.keys)
            left = known // per_chunk - made
            if left <= 0:
                continue
            count = left
            if share is not None:
                count = min(left, KEYS_MADE_PER_KEY * share.take(cdiv(left, KEYS_MADE_PER_KEY)))
            first = per_chunk * (made + 1) - 1
            record.keys += make_keys(hashes[first : first + count * per_chunk : per_chunk], group.index, self._scope)
            if count < left:
                return False
        return known == len(hashes)

    @property
    def hit_end_max(self) -> int:
        """Last token at which a hit may end.

        The engine always computes the last token of a prompt, in order to sample from it. With windows the hit must end
        before that token; otherwise the window would have to end one token earlier than it does.
        """
        return self.request.num_tokens - self._windows

    def note_hit(self, tokens: int) -> None:
        """Note the answer: the first ``tokens`` tokens are local or can be loaded (S15)."""
        self.continues_prefix = False
        for group in self.groups:
            group.hit_chunks = tokens // group.chunk_tokens

    def replace_blocks(self, block_ids: tuple[tuple[int, ...], ...], *, whole_table: bool) -> None:
        """Replace the block tables by scheduled ids, or append them; one entry per group."""
        for record, ids in zip(self.groups, block_ids, strict=True):
            if whole_table:
                record.block_ids = list(ids)
            else:
                record.block_ids.extend(ids)

    def was_offered(self, tokens: int) -> bool:
        """Whether every storable chunk that ends within ``tokens`` was offered for storing."""
        for group in self.groups:  # noqa: SIM110 - asked in every step of every request: all() takes three times as long
            if (group.next_stored + 1) * group.chunk_tokens <= tokens:
                return False
        return True

    def note_resets(self, resets: int) -> None:
        """Move the store cursors to the start, at the first call about the request after a reset of the cache."""
        if self.resets != resets:
            self.resets = resets
            self.offer_again()

    def offer_again(self, tokens: int = 0) -> None:
        """Move the store cursors back to the chunks behind the first ``tokens``; present chunks will be filtered out.

        Chunks that counted as stored may be absent, because a load of them failed or the cache was reset (S91).
        """
        self.quiet_tokens = 0
        self.continues_prefix = False
        for group in self.groups:
            group.next_stored = min(group.next_stored, tokens // group.chunk_tokens)

    def skip_loaded(self, tokens: int) -> None:
        """Move the store cursors past the first ``tokens``: these chunks came from a tier."""
        for group in self.groups:
            group.next_stored = max(group.next_stored, -(-tokens // group.chunk_tokens))

    def sources(self, keys: Sequence[Key], sources: Sequence[str]) -> Sequence[str]:
        """Tiers that the bytes of ``keys`` came from: of those read ahead for the request, the tier that was read."""
        if not self.loaded_ahead:
            return sources
        return [self.loaded_ahead.get(key, source) for key, source in zip(keys, sources, strict=True)]

    @property
    def has_jobs(self) -> bool:
        """Whether a transfer is in flight, or the next segment of the load is being gathered."""
        return self.is_loading or bool(self.store_jobs)

    @property
    def is_loading(self) -> bool:
        """Whether its load has not ended."""
        return self.streaming or self.load_job is not None


def keys_of(request: Request, geometry: Geometry) -> tuple[Iterator[Key], int]:
    """Keys of all whole chunks of a request, in all groups, and their number. A key is made when it is asked for."""
    hashes, scope = [*request.block_hashes], scope_of(request)
    groups = [(group.index, group.hashes_per_chunk) for group in geometry.groups]
    by_group = [(group, hashes[per_chunk - 1 :: per_chunk]) for group, per_chunk in groups]
    parts = ((group, part) for group, some in by_group for part in batches(some, KEYS_TOGETHER))
    keys = chain.from_iterable(make_keys(part, group, scope) for group, part in parts)
    return keys, sum(len(some) for _, some in by_group)


def scope_of(request: Request) -> bytes:
    """Scope of the request's keys: its salt, and its adapter with what is in it, if the engine provides them."""
    salt, adapter = getattr(request, "cache_salt", None), getattr(request, "lora_name", None)
    if content := getattr(request, "adapter_digest", ""):
        adapter = f"{adapter or ''}\n{content}"
    return make_scope(None if salt is None else str(salt), None if adapter is None else str(adapter))


def _mapping(params: object) -> Mapping[str, Any]:
    """The user's parameters; empty if they are no mapping (the hint reader warns about that)."""
    return {} if params is None or not isinstance(params, Mapping) else params


def _search_groups(groups: Sequence[GroupRecord], geometry: Geometry) -> tuple[SearchGroup, ...]:
    """Groups for the search, in lookup order. They share the growing key lists with the records."""
    return tuple(
        [
            SearchGroup(
                groups[i].chunk_tokens, groups[i].keys, geometry.groups[i].window_chunks, geometry.groups[i].end_slack
            )
            for i in geometry.lookup_order
        ]
    )
