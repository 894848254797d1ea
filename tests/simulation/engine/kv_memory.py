"""KV memory of the simulated engine: real bytes in numpy arrays, compared before they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from simulation.checks.failure import Violation, demand
from simulation.engine.expected_bytes import TOKEN_BYTES, SimRequest, Truth
from tierkv.types.engine import NULL_BLOCK_ID, EngineSpec
from tierkv.types.geometry import cdiv

Bytes = npt.NDArray[np.uint8]

WRONG_BYTES = "never wrong bytes"
"""Name of the first promise."""

ENGINE = "the simulated engine does its part"


class KvMemory:
    """Tensors ``[num_blocks, page_bytes]`` per worker and group. Groups share block ids, not memory."""

    def __init__(self, spec: EngineSpec, truth: Truth, num_blocks: int) -> None:
        self._truth = truth
        self._groups = spec.groups
        self._tensors: list[list[list[Bytes]]] = [
            [[np.full((num_blocks, size), 0xEE, np.uint8) for size in group.page_bytes] for group in spec.groups]
            for _ in range(spec.num_workers)
        ]
        self._parts = [self._parts_of(index) for index in range(len(spec.groups))]

    def _parts_of(self, index: int) -> list[tuple[int, Bytes]]:
        """Number and tensor of each part of a group. The truth counts tensors, worker by worker, without copies."""
        group = self._groups[index]
        return [
            (rank // group.copies * len(group.page_bytes) + number, tensor)
            for rank, worker in enumerate(self._tensors)
            for number, tensor in enumerate(worker[index])
        ]

    def caches(self, worker: int) -> list[list[Bytes]]:
        """Tensors that a worker registers."""
        return self._tensors[worker]

    def learn(self, request: SimRequest) -> None:
        """Compute the right bytes of a request's new chunks."""
        self._truth.learn(request)

    def garble(self, group: int, block_ids: Iterable[int], filling: int) -> None:
        """Overwrite blocks that have a new owner, so that no previous byte is left."""
        for block_id in block_ids:
            for _, tensor in self._parts[group]:
                tensor[block_id] = filling

    def verify(self, request: SimRequest, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Read tokens ``start`` to ``stop`` as attention would.

        Raises:
            Violation: a byte is wrong.
        """
        if start >= stop:
            return
        size = self._groups[group].block_tokens
        first = start // size
        ids = table[first : cdiv(stop, size)]
        demand(NULL_BLOCK_ID not in ids, ENGINE, f"request {request.request_id} has freed a block that it needs")
        span = slice((start - first * size) * TOKEN_BYTES, (stop - first * size) * TOKEN_BYTES)
        for part, tensor in self._parts[group]:
            right = self._truth.tensor_bytes(request, group, part, start, stop)
            found = tensor[ids].reshape(-1)[span].tobytes()
            if found != right and not self._truth.are_right(found, request, group, part, start):
                bad = next(i for i, (one, other) in enumerate(zip(found, right, strict=True)) if one != other)
                token = start + bad // TOKEN_BYTES
                raise Violation(
                    WRONG_BYTES,
                    f"request {request.request_id} would compute from wrong bytes: group {group}, tensor {part}, "
                    f"token {token}, in GPU block {ids[token // size - first]}",
                )

    def compute(self, request: SimRequest, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Write tokens ``start`` to ``stop``, as a forward pass does."""
        size = self._groups[group].block_tokens
        for i in range(start // size, cdiv(stop, size)):
            if table[i] == NULL_BLOCK_ID:
                continue
            begin, end = max(start, i * size), min(stop, (i + 1) * size)
            span = slice((begin - i * size) * TOKEN_BYTES, (end - i * size) * TOKEN_BYTES)
            for part, tensor in self._parts[group]:
                right = self._truth.tensor_bytes(request, group, part, begin, end)
                tensor[table[i], span] = np.frombuffer(right, np.uint8)
