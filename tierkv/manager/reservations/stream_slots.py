"""Host slots for loads that stream: segments collected for them, beside the reservations of waiting requests.

A stream holds GPU blocks and waits for slots. A request that was offered a hit holds slots and waits for GPU blocks. If
both drew on one account, they could wait for each other without end. While any load streams, half of the reservable
chunks belongs to streams, in a queue of their own. Waiting requests have the other half. Neither side takes what the
other one needs to progress, and on either side the oldest progresses
(see :mod:`tierkv.manager.reservations.reservations`).

A segment counts until it is copied. Otherwise slots that pass from stream to stream would never be free for other uses.
While no request waits, streams use all reservable chunks: one half is read while the other half is copied.

Opening the first stream takes no slots from waiting requests: its own offer had half of the account.
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
    """Segments of streams. Sans-IO.

    Args:
        waiting: reservations of requests that wait for an answer, or for blocks.
    """

    def __init__(self, host: HostTier, tier_io: TierIO, waiting: Reservations) -> None:
        self._host = host
        self._tier_io = tier_io
        self._waiting = waiting
        self._all_max = waiting.chunks_max
        self.chunks_max = max(1, waiting.chunks_max // 2)
        """Number of chunks that belong to streams while requests wait."""
        self._segments = Reservations(host, tier_io, self.chunks_max, trusting=True)
        self._owners: set[str] = set()
        self._copying = 0

    @property
    def _limit(self) -> int:
        """Number of chunks that streams may have now, collected or being copied."""
        return self._all_max if self._waiting.is_idle else self.chunks_max

    @property
    def segment_chunks_max(self) -> int:
        """Chunks that one stream should reserve at once, so that all streams can read and copy side by side."""
        return max(1, self._limit // (2 * max(1, len(self._owners))))

    def open(self, owner: str, chunks: int) -> None:
        """Begin a stream for the owner's load, ``chunks`` of which are being copied already."""
        self._owners.add(owner)
        self._copying += chunks
        self._waiting.chunks_max = max(1, self._all_max - self.chunks_max)

    def close(self, owner: str) -> None:
        """End the owner's stream, and release its segment."""
        self._segments.release(owner)
        self._owners.discard(owner)
        if not self._owners:
            self._waiting.chunks_max = self._all_max

    # -- one segment --------------------------------------------------------------------------------------------------

    def reserve_segment(self, keys: tuple[Key, ...], ctx: RequestContext) -> Reservation:
        """Reserve the owner's next segment, as :meth:`Reservations.reserve`. Older streams come first."""
        self._segments.chunks_max = max(0, self._limit - self._copying)
        return self._segments.reserve(ctx.request_id, keys, ctx.hints)

    def release_segment(self, ctx: RequestContext) -> None:
        """Release what is reserved of the owner's next segment."""
        self._segments.release(ctx.request_id)

    def hand_over(self, keys: Sequence[Key], ctx: RequestContext) -> LoadGrant:
        """End the reservation of a segment, and pass its holds on ``keys`` to a job.

        Raises:
            InvariantError: a chunk is neither reserved nor readable.
        """
        handed = self._segments.hand_over(ctx.request_id, tuple(keys))
        if isinstance(handed, bytes):
            raise InvariantError(f"a segment of {ctx.request_id!r} is sent before chunk {handed.hex()} is readable")
        slots, sources = handed
        self._copying += len(slots)
        self._tier_io.used(slots, ctx.hints)
        return LoadGrant(tuple(keys), self._host.slots.refs(slots), tuple(sources))

    def copied(self, chunks: int) -> None:
        """End a job that copied ``chunks``."""
        self._copying -= chunks

    def is_lost(self, key: Key, ctx: RequestContext) -> bool:
        """Whether a chunk is not in any tier that the request may load from."""
        if self._host.slots.find(key) is not None:
            return False
        return self._tier_io.source_of(key, ctx.hints.load_tiers, trusting=True) is None

    def is_readable(self, key: Key) -> bool:
        """Whether a chunk is readable in the host tier."""
        return bool(self._host.slots.is_readable(key))

    # -- whole cache -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Release chunks that exceeded the bound of previous steps."""
        self._segments.begin_step()

    def release_all(self) -> None:
        """Release all segments, after a reset."""
        self._segments.release_all()

    @property
    def owners(self) -> list[str]:
        """Owners that have a segment."""
        return self._segments.owners

    @property
    def num_reserved(self) -> int:
        """Number of chunks in segments."""
        return self._segments.num_reserved

    def granted(self, owner: str) -> dict[Key, tuple[Chunk, str]]:
        """Snapshots of the chunks of the owner's segment, each with its source tier."""
        return self._segments.granted(owner)

    def validate(self) -> None:
        """Check the segments, as :meth:`Reservations.validate`, and that only streams have them.

        Raises:
            InvariantError: a segment is wrong, or its owner does not stream.
        """
        self._segments.chunks_max = self._all_max
        self._segments.validate()
        require(self._copying >= 0, f"{self._copying} chunks of streams are being copied")
        require(bool(self._owners) or not self._copying, "chunks are being copied for a load that does not stream")
        require(self._owners.issuperset(self._segments.owners), "a segment is reserved for a load that does not stream")
