"""Runs of chunks whose slots and blocks follow one another, so that one call copies them: a pure function.

A copy of some ten microseconds gives the interpreter's lock back for so short a time that no waiting thread wakes up
before the next one takes it again. Then they wait for the interpreter's switch interval, 5 ms. A longer copy lets them
work meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.types.transfers import TransferJob

RUN_BYTES = 1 << 20
"""Bytes of a run at most: a core's cache still holds them for the checksums."""


def chunk_runs(
    job: TransferJob,
    blocks: Sequence[tuple[int, Sequence[int]]],
    blocks_per_chunk: int,
    chunk_bytes: Sequence[int],
    places: range,
) -> Iterator[tuple[range, bool]]:
    """Indices of the chunks of a part, in order, and whether they are a run; those between two runs come together.

    The slots of a run ascend or descend, its blocks ascend. A chunk that lacks blocks is in none.

    Args:
        job: the chunks and their slots.
        blocks: of each chunk, the number of skipped blocks, and the ids of the others.
        blocks_per_chunk: number of blocks of a whole chunk.
        chunk_bytes: bytes of a chunk of each group.
        places: indices of the part in the job.
    """
    slots, groups = job.slots, job.chunk_groups
    single = start = places.start  # chunks from ``single`` to ``start`` are in no run
    step = count_max = 0
    next_block = -1
    for i in places:
        ids = blocks[i][1]
        slot = slots[i].slot
        is_whole = len(ids) == blocks_per_chunk and slot >= 0 and (blocks_per_chunk == 1 or _ascend(ids))
        ascent = slot - slots[i - 1].slot
        follows = is_whole and ids[0] == next_block and i - start < count_max and ascent in (1, -1)
        if follows and groups[i] == groups[i - 1] and step in (0, ascent):
            step = ascent
        else:
            if i - start > 1:
                if single < start:
                    yield range(single, start), False
                yield range(start, i), True
                single = i
            start, step, count_max = i, 0, RUN_BYTES // chunk_bytes[groups[i]]
        next_block = ids[-1] + 1 if is_whole else -1
    is_run = places.stop - start > 1
    if single < (start if is_run else places.stop):
        yield range(single, start if is_run else places.stop), False
    if is_run:
        yield range(start, places.stop), True


def _ascend(ids: Sequence[int]) -> bool:
    first, count = ids[0], len(ids)
    return ids[-1] - first == count - 1 and list(ids) == list(range(first, first + count))
