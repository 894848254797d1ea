"""Host slots for loads that stream, gathered segment by segment, beside the reservations of waiting requests.

A stream holds GPU blocks and waits for slots; a request that was offered a hit holds slots and waits for GPU blocks. If
both drew on one account they could wait for each other for ever. So as long as any load streams, half of what may be
reserved is kept for streams, in a queue of their own, and requests that wait have the other half. Neither side can take
what the other one needs to go on, and on either side the oldest progresses
(see :mod:`tierkv.manager.reservations.reservations`).

What streams have, counts until it is copied: slots that go from hand to hand among them would never be free for anybody
else. While nobody else wants slots, they use all of them, one half being read while the other one is copied.

Nobody is robbed when the first stream begins: what it was offered took half of the account itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import InvariantError, require
from tierkv.manager.contract import LoadGrant, RequestContext
from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.reservations.reservation import Reservation
from tierkv.manager.reservations.reservations import Reservations
from tierkv.types.keys import Key


class StreamSlots:
    """Sans-IO. ``staged``: the reservations of requests that wait for an answer, or for blocks."""

    def __init__(self, host: HostTier, tier_io: TierIO, staged: Reservations) -> None:
        self._host = host
        self._tier_io = tier_io
        self._staged = staged
        self._all_max = staged.chunks_max
        self.chunks_max = max(1, staged.chunks_max // 2)
        """Chunks that are the streams' own, whatever others want."""
        self._segments = Reservations(host, tier_io, self.chunks_max, trusting=True)
        self._owners: set[str] = set()
        self._copying = 0

    @property
    def _limit(self) -> int:
        """Chunks that streams may have now, gathered or being copied."""
        return self._all_max if self._staged.is_idle else self.chunks_max

    @property
    def segment_chunks_max(self) -> int:
        """Chunks that one stream should gather at once, so that all can read, and copy, side by side."""
        return max(1, self._limit // (2 * max(1, len(self._owners))))

    def open(self, owner: str, chunks: int) -> None:
        """The owner's load streams from now on; so many chunks of it are being copied."""
        self._owners.add(owner)
        self._copying += chunks
        self._staged.chunks_max = max(1, self._all_max - self.chunks_max)

    def close(self, owner: str) -> None:
        """It has ended: nothing is gathered for it any more."""
        self._segments.release(owner)
        self._owners.discard(owner)
        if not self._owners:
            self._staged.chunks_max = self._all_max

    # -- one segment --------------------------------------------------------------------------------------------------

    def gather(self, keys: tuple[Key, ...], ctx: RequestContext) -> Reservation:
        """Gather a segment, as :meth:`OffloadManager.reserve` gathers a hit. A new one queues behind other streams'."""
        self._segments.chunks_max = max(0, self._limit - self._copying)
        return self._segments.reserve(ctx.request_id, keys, ctx.hints)

    def release(self, ctx: RequestContext) -> None:
        """Let go of what is gathered for the owner's next segment."""
        self._segments.release(ctx.request_id)

    def hand_over(self, keys: Sequence[Key], ctx: RequestContext) -> LoadGrant:
        """End the reservation, and hold its readable chunks ``keys`` for a job."""
        handed = self._segments.hand_over(ctx.request_id, tuple(keys))
        if isinstance(handed, bytes):
            raise InvariantError(f"a segment of {ctx.request_id!r} is sent before chunk {handed.hex()} has come")
        slots, sources = handed
        self._copying += len(slots)
        self._tier_io.used(slots, ctx.hints)
        return LoadGrant(tuple(keys), self._host.slots.refs(slots), tuple(sources))

    def copied(self, chunks: int) -> None:
        """A job with so many chunks has ended."""
        self._copying -= chunks

    def is_lost(self, key: Key, ctx: RequestContext) -> bool:
        """Whether a chunk is in no tier any more that the owner may load from."""
        if self._host.slots.find(key) is not None:
            return False
        return self._tier_io.source_of(key, ctx.hints.load_tiers, trusting=True) is None

    def is_readable(self, key: Key) -> bool:
        """Whether a chunk is in the host tier."""
        return bool(self._host.slots.is_readable(key))

    # -- whole cache -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """See :meth:`Reservations.begin_step`."""
        self._segments.begin_step()

    def release_all(self) -> None:
        """The cache is emptied: nothing is gathered any more."""
        self._segments.release_all()

    @property
    def owners(self) -> list[str]:
        """Those for whom something is gathered at present."""
        return self._segments.owners

    @property
    def held(self) -> int:
        """Chunks that are gathered at present."""
        return self._segments.held

    def granted(self, owner: str) -> dict[Key, tuple[Chunk, str]]:
        """See :meth:`Reservations.granted`."""
        return self._segments.granted(owner)

    def validate(self) -> None:
        """See :meth:`Reservations.validate`; and only streams gather here."""
        self._segments.chunks_max = self._all_max
        self._segments.validate()
        require(self._copying >= 0, f"{self._copying} chunks of streams are being copied")
        require(bool(self._owners) or not self._copying, "chunks are being copied for a load that does not stream")
        require(self._owners.issuperset(self._segments.owners), "a segment is gathered for a load that does not stream")
