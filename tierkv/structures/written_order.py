"""Ranks as backends keep them, and the order of eviction that follows from them after a restart.

A chunk that is written gets a *written rank*: who stored it, whom that request continued, and the token at which the
chunk ends. So a chat that went on in several requests is one prompt again after a restart: its first chunks stay as
long as its last turn, though an earlier request wrote them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tierkv.structures.columns import column, grown, longer

WRITERS_MAX = 4096
"""Requests whose predecessor is remembered. The oldest are forgotten: what they write later continues no other."""

DEPTH_BITS = 24
ID_BITS = 20
"""Bits of a request in a written rank: its own number is above that of the request which it continues. 0: none."""

RANK_MAX = (1 << 2 * ID_BITS + DEPTH_BITS) - 1
"""Highest written rank."""

_DEPTH_MAX = (1 << DEPTH_BITS) - 1
_ID_MAX = (1 << ID_BITS) - 1
_MOMENT_BITS = 40
_MOMENT_MAX = (1 << _MOMENT_BITS) - 1
_RANK_DEPTH_BITS = 32  # of a rank in this process: see prefix_order
_RANK_DEPTH_MAX = (1 << _RANK_DEPTH_BITS) - 1


class WrittenRanks:
    """Converts the ranks of this process (:mod:`tierkv.policies.prefix_order`) to written ones. Sans-IO; O(1) a chunk.

    Args:
        salt: differs between processes, because the ids of requests begin anew with each.
        kept: whether the backend keeps ranks.
    """

    def __init__(self, salt: int, *, kept: bool = True) -> None:
        self._salt = salt
        self._kept = kept
        self._continued: dict[int, int] = {}  # by request: number of the one that it continues

    def continues(self, rank: int, before: int) -> None:
        """Note which chunk a request continues.

        Args:
            rank: of any chunk of the request, in this process; 0: unknown.
            before: written rank of the last chunk before those that it will store; 0: unknown.
        """
        if self._kept and rank:
            owner = rank >> _RANK_DEPTH_BITS
            self._continued.pop(owner, None)
            self._continued[owner] = before >> ID_BITS + DEPTH_BITS
            if len(self._continued) > WRITERS_MAX:
                del self._continued[next(iter(self._continued))]

    def of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Written rank of each chunk, from its rank in this process; 0: unknown. Empty if the backend keeps none."""
        if not self._kept:
            return ()
        fronts = {owner: self._front(owner) for owner in {rank >> _RANK_DEPTH_BITS for rank in ranks}}
        return tuple(
            [
                fronts[rank >> _RANK_DEPTH_BITS]
                | (depth if (depth := rank & _RANK_DEPTH_MAX) < _DEPTH_MAX else _DEPTH_MAX)
                if rank
                else 0
                for rank in ranks
            ]
        )

    def _front(self, owner: int) -> int:
        """Written rank of a request, without the depth."""
        number = crc32(owner.to_bytes(4, "little"), self._salt) % _ID_MAX + 1
        return (number << ID_BITS | self._continued.get(owner, 0)) << DEPTH_BITS


class WrittenColumn:
    """Written rank of each stored chunk of a tier, by row. O(1) per chunk; takes no memory while none is known."""

    def __init__(self) -> None:
        self._ranks = column("Q", 0)

    def note(self, rows: Sequence[int], ranks: Sequence[int]) -> None:
        """Enter the written rank of each row; empty: they are unknown."""
        if not rows or not (len(ranks) or len(self._ranks)):
            return
        if (length := max(rows) + 1) > len(self._ranks):
            self._ranks = longer(self._ranks, grown(len(self._ranks), length))
        known, first = self._ranks, rows[0]
        # As at an open, of a million chunks.
        if len(ranks) > 1 and (isinstance(rows, range) or rows == [*range(first, first + len(rows))]):
            known[first : first + len(rows)] = memoryview(ranks if isinstance(ranks, array) else array("Q", ranks))
            return
        for row, rank in zip(rows, ranks if len(ranks) else bytes(len(rows)), strict=True):
            known[row] = rank

    def at(self, row: int) -> int:
        """Written rank of the chunk in a row; 0: unknown."""
        return self._ranks[row] if row < len(self._ranks) else 0


def eviction_order(ranks: array[int]) -> npt.NDArray[np.intp] | None:
    """Order in which stored chunks are to be evicted, for a tier whose chunks come from its backend's index.

    Requests are in the order of their last chunk, and the chunks of each request tail first. The chunks that a request
    continues count as its own, although others wrote them. Chunks of unknown rank keep their place. O(n log n); may run
    on any thread.

    Args:
        ranks: written ranks, of type "Q", one per chunk, oldest chunk first.

    Returns:
        Positions in ``ranks``; None if no rank is known.
    """
    known = np.frombuffer(ranks, np.int64)
    ranked = np.flatnonzero(known)
    if not len(ranked):
        return None
    moments = np.arange(len(known), dtype=np.int64)
    moments[ranked] = _moments(np.frombuffer(ranks, np.uint64)[ranked], ranked)
    keys = moments << DEPTH_BITS | (~known & _DEPTH_MAX)  # one column to sort
    return np.argsort(keys, kind="stable")


def reordered(numbers: array[int], order: npt.NDArray[np.intp]) -> array[int]:
    """Numbers of type "Q" at the positions of ``order``."""
    return array("Q", np.frombuffer(numbers, np.uint64)[order].tobytes())


def _moments(ranks: Any, written: Any) -> Any:  # noqa: ANN401 - numpy arrays: 64 bits a chunk
    """Moment of the last chunk that needs each chunk: of its own request, or of one that continues it.

    ranks: of the chunks, none of them 0. written: moment at which each was written, ascending.
    """
    requests, first, owners = np.unique(ranks >> np.uint64(DEPTH_BITS), return_index=True, return_inverse=True)
    requests, depths = requests.astype(np.int64), (ranks & np.uint64(_DEPTH_MAX)).astype(np.int64)
    begin = written[first]
    last = np.zeros(len(requests), np.int64)
    np.maximum.at(last, owners, written)
    children, parents = _continued(requests >> ID_BITS, requests & _ID_MAX, begin)
    if not len(children):
        return last[owners]
    # What needs a request needs what that one continues. The youngest are first, so one pass reaches all.
    needed = last.tolist()
    youngest = np.argsort(-begin[children], kind="stable")
    for child, parent in zip(children[youngest].tolist(), parents[youngest].tolist(), strict=True):
        needed[parent] = max(needed[parent], needed[child])
    # Of the request that is continued, only the chunks before the first one of the other are needed.
    fork = np.full(len(requests), _DEPTH_MAX, np.int64)
    np.minimum.at(fork, owners, depths)
    places = parents << DEPTH_BITS | fork[children]
    by_place = np.argsort(places, kind="stable")
    places, parents, until = places[by_place], parents[by_place], np.array(needed)[children[by_place]]
    grouped = (len(requests) - parents) << _MOMENT_BITS | until  # so that the latest behind a fork stays in its request
    until = np.maximum.accumulate(grouped[::-1])[::-1] & _MOMENT_MAX
    own = last[owners]
    behind = np.searchsorted(places, owners << DEPTH_BITS | depths, side="right")
    found = np.flatnonzero(behind < len(places))
    found = found[parents[behind[found]] == owners[found]]
    own[found] = np.maximum(own[found], until[behind[found]])
    return own


def _continued(numbers: Any, continued: Any, begin: Any) -> tuple[Any, Any]:  # noqa: ANN401 - numpy arrays
    """Requests that continue another one that is stored, and that one: positions in the columns.

    Of several with one number it is the youngest that is older, since numbers are short.
    """
    by_number = np.argsort(numbers << _MOMENT_BITS | begin)
    keys = (numbers << _MOMENT_BITS | begin)[by_number]
    before = np.searchsorted(keys, continued << _MOMENT_BITS | begin) - 1
    children = np.flatnonzero((continued > 0) & (before >= 0))
    parents = by_number[before[children]]
    same = numbers[parents] == continued[children]
    return children[same], parents[same]
