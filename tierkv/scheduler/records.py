"""What the scheduler remembers of a request."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import RequestContext
from tierkv.scheduler.request_state import RequestEvent, RequestState, next_state
from tierkv.scheduler.search import SearchGroup
from tierkv.types.engine import Request
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_keys


class GroupRecord:
    """One request in one group: its chunk keys, its GPU blocks, and the first chunk not yet offered for storing."""

    __slots__ = ("block_ids", "chunk_tokens", "keys", "next_stored")

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.keys: list[Key] = []
        self.block_ids: list[int] = []
        self.next_stored = 0


class RequestRecord:
    """One request over all groups. Invariant I1: its jobs are one load, or stores, or none."""

    def __init__(self, request: Request, geometry: Geometry, warn: Callable[[str], None] = lambda _: None) -> None:
        self.request = request
        params = request.kv_transfer_params or {}
        self.ctx = RequestContext(request.request_id, params)
        self.state = RequestState.IDLE
        self.groups = [GroupRecord(group.chunk_tokens) for group in geometry.groups]
        self.load_job: int | None = None
        self.store_jobs: set[int] = set()
        self.computed_tokens = 0
        self.offload_tokens_max = _offload_tokens_max(self.ctx, warn)
        # The lookup in progress: since when it is deferred, what it was about, and what it found.
        self.asked_since_s: float | None = None
        self.asked_at_s = 0.0
        self.asked_about: tuple[int, int] | None = None
        self.asked_version = -1
        self.hit_tokens = 0
        self.wanted: tuple[Key, ...] = ()

    def apply(self, event: RequestEvent) -> None:
        """Move to the state after ``event``.

        Raises:
            IllegalTransitionError: the request cannot do that now.
        """
        self.state = next_state(self.ctx.request_id, self.state, event)

    def extend_keys(self, geometry: Geometry) -> None:
        """Add the keys of chunks whose hashes have become known (S3, S4)."""
        hashes = self.request.block_hashes
        for record, group in zip(self.groups, geometry.groups, strict=True):
            per_chunk = group.hashes_per_chunk
            new = hashes[per_chunk * (len(record.keys) + 1) - 1 :: per_chunk]
            record.keys.extend(make_keys(new, group.index))

    def search_groups(self) -> list[SearchGroup]:
        """The groups as the search wants them."""
        return [SearchGroup(group.chunk_tokens, group.keys) for group in self.groups]

    def replace_blocks(self, block_ids: tuple[tuple[int, ...], ...], *, whole_table: bool) -> None:
        """Take over block ids that the engine scheduled.

        Raises:
            EngineProtocolError: the number of groups differs.
        """
        if len(block_ids) != len(self.groups):
            raise EngineProtocolError(
                f"request {self.ctx.request_id!r}: block ids of {len(block_ids)} groups, "
                f"the engine has {len(self.groups)}"
            )
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
        self.wanted = ()

    def offer_again(self) -> None:
        """Offer all chunks again; those that are present will be filtered out.

        Some that were thought to be stored may not be: a load of them failed, or the cache was emptied (S91).
        """
        for group in self.groups:
            group.next_stored = 0

    @property
    def has_jobs(self) -> bool:
        """Whether a transfer of this request is in flight."""
        return self.load_job is not None or bool(self.store_jobs)


def _offload_tokens_max(ctx: RequestContext, warn: Callable[[str], None]) -> int | None:
    """``kv_transfer_params["max_offload_tokens"]``: a true int of at least 0; anything else is ignored aloud (S12)."""
    value = ctx.kv_transfer_params.get("max_offload_tokens")
    if value is None or (type(value) is int and value >= 0):
        return value
    warn(f"request {ctx.request_id!r}: max_offload_tokens = {value!r} is ignored: give an integer of 0 or more")
    return None
