"""Stack distances of a trace: one pass answers how many chunks an LRU cache of any size would find.

The *stack distance* of a chunk at some time is the number of different chunks used since its latest use, itself
included. An LRU cache of C chunks has the chunk exactly if the distance is at most C (Mattson and others, 1970). So the
distances of a trace give the hits of all sizes at once.

A chunk last used at position p, looked up at position a, has the distance ``a - p - n``. The number n counts positions
k < a whose chunk had its previous use behind p: they are repetitions. All n are counted together by a wavelet matrix
over the previous uses, in O(n log n) for n chunks, with a few passes of numpy per bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.replay.trace import Trace

Ints = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
"""Distance of a chunk that was never used before."""


@dataclass(frozen=True, slots=True)
class StackDistances:
    """Distances of all chunks of a trace, in the order of ``Trace.chunks``."""

    needed: Ints
    """Smallest size of a cache, in chunks, that finds the chunk and all chunks before it in its prompt."""
    at_use: Ints
    """Distance at the use of the chunk. A smaller cache has to write the chunk again."""

    def hits(self, size: int) -> int:
        """Number of chunks found by a cache of ``size`` chunks, from the front of each prompt."""
        return int(np.count_nonzero(self.needed <= size))

    def writes(self, size: int) -> int:
        """Number of chunks written into a cache of ``size`` chunks."""
        return int(np.count_nonzero(self.at_use > size))

    def curve(self) -> tuple[Ints, Ints]:
        """Sizes at which the number of hits grows, and the hits from each size on."""
        sizes, counts = np.unique(self.needed[self.needed != NEVER], return_counts=True)
        return sizes, np.cumsum(counts)


def stack_distances(trace: Trace) -> StackDistances:
    """Distances of a trace. A request looks up all of its chunks when it arrives, then uses them, tail first."""
    chunks = np.frombuffer(trace.chunks, np.uint32) if trace.chunks else np.zeros(0, np.uint32)
    starts = np.frombuffer(trace.starts, np.uint64).astype(np.int64)
    lengths = np.diff(starts)
    arrival = np.repeat(starts[:-1], lengths)  # of each use: the position at which its request arrived
    place = arrival + np.repeat(starts[1:], lengths) - 1 - np.arange(len(chunks))  # tail first: position <-> index
    previous = _previous_uses(chunks[place])
    at_arrival = previous[_first_in_request(previous, arrival)]
    at_use = _distances(np.arange(len(chunks)), previous, previous)
    looked_up = _distances(arrival, at_arrival, previous)[place]
    return StackDistances(_running_maximum(looked_up, lengths), at_use[place])


def _previous_uses(chunks: npt.NDArray[np.uint32]) -> Ints:
    """Position of the previous use of the same chunk, by position; -1: none."""
    order = np.argsort(chunks, kind="stable")
    is_same = chunks[order[1:]] == chunks[order[:-1]]
    previous = np.full(len(chunks), -1, np.int64)
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous


def _first_in_request(previous: Ints, arrival: Ints) -> Ints:
    """Position of the first use of the same chunk in the same request, by position."""
    first = np.where(previous >= arrival, previous, np.arange(len(previous)))
    while True:  # each round doubles the number of repetitions that are skipped
        further = first[first]
        if np.array_equal(further, first):
            return first
        first = further


def _distances(at: Ints, used: Ints, previous: Ints) -> Ints:
    """Distance at position ``at`` of chunks last used at ``used``, for each of both."""
    known = used >= 0
    result = np.full(len(at), NEVER, np.int64)
    result[known] = at[known] - used[known] - _count_greater(previous + 1, at[known], used[known] + 1)
    return result


def _count_greater(values: Ints, ends: Ints, bounds: Ints) -> Ints:
    """Count the ``values[:end]`` above ``bound``, for each end and bound. No value is negative.

    A wavelet matrix, built level by level: values are sorted stably by one bit after the other, the highest first, and
    each query follows the values that begin with the bits of its bound.
    """
    counts = np.zeros(len(ends), np.int64)
    begins, ends = np.zeros(len(ends), np.int64), ends.copy()
    largest = max(values.max(initial=0), bounds.max(initial=0))
    for bit in reversed(range(int(largest).bit_length())):
        is_set = (values >> bit) & 1 != 0
        ones_before = np.concatenate(([0], np.cumsum(is_set)))
        num_zeros = len(values) - int(ones_before[-1])
        ones = ones_before[begins], ones_before[ends]
        follows_ones = (bounds >> bit) & 1 != 0
        counts += np.where(follows_ones, 0, ones[1] - ones[0])
        begins = np.where(follows_ones, num_zeros + ones[0], begins - ones[0])
        ends = np.where(follows_ones, num_zeros + ones[1], ends - ones[1])
        values = np.concatenate((values[~is_set], values[is_set]))
    return counts


def _running_maximum(values: Ints, lengths: Ints) -> Ints:
    """Largest value from the start of each request on."""
    unknown = len(values) + 1  # above all distances
    offsets = np.repeat(np.arange(len(lengths)), lengths) * (unknown + 1)  # so that no request sees the one before
    result = np.maximum.accumulate(np.minimum(values, unknown) + offsets) - offsets
    result[result == unknown] = NEVER
    return result
