"""KV memory of the bed's engine: real bytes, checked on every read, with an audit of overlapping reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core_truth import TOKEN_BYTES, Audit, BedRequest, Truth

from tierkv.types.engine import NULL_BLOCK_ID, GroupKind, GroupSpec
from tierkv.types.geometry import cdiv


class BedMemory:
    """Blocks of bytes by block id. Groups share the blocks; a group with small blocks uses the front of one.

    A block of a state space group holds the state after its last computed token, in all of its bytes.
    """

    def __init__(self, groups: Sequence[GroupSpec], num_blocks: int, truth: Truth, audit: Audit) -> None:
        size = max(group.block_tokens for group in groups) * TOKEN_BYTES
        self.blocks = {block_id: bytearray(size) for block_id in range(1, num_blocks + 1)}
        self._groups = groups
        self._truth = truth
        self._audit = audit

    def learn(self, request: BedRequest) -> None:
        """Compute the right bytes of a request's new chunks."""
        self._truth.learn(request)

    def garble(self, group: int, block_ids: Iterable[int], filling: int) -> None:
        """Keep the bytes of the previous owner, which readers will find wrong."""

    def verify(self, request: BedRequest, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Read tokens ``start`` to ``stop`` as attention would.

        Raises:
            AssertionError: a byte is wrong, or a block is being written.
        """
        size = self._groups[group].block_tokens
        for index in range(start // size, cdiv(stop, size)):
            tokens, block_id = range(max(start, index * size), min(stop, (index + 1) * size)), table[index]
            assert block_id != NULL_BLOCK_ID, "the engine freed a block that it needs"
            self._audit.begin_read(("gpu", block_id), "forward")
            part, right = self._bytes_of(request, group, index, tokens)
            assert bytes(self.blocks[block_id][part]) == right, (
                f"{request.request_id} computes from wrong bytes: group {group}, {tokens}, block {block_id}"
            )
            self._audit.end_read(("gpu", block_id), "forward")

    def compute(self, request: BedRequest, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Write tokens ``start`` to ``stop``, as a forward pass does."""
        size = self._groups[group].block_tokens
        for index in range(start // size, cdiv(stop, size)):
            if table[index] == NULL_BLOCK_ID:
                continue
            tokens = range(max(start, index * size), min(stop, (index + 1) * size))
            part, new = self._bytes_of(request, group, index, tokens)
            block = self.blocks[table[index]]
            if block[part] != new:  # computing a loaded last token again changes nothing
                self._audit.touch(("gpu", table[index]), f"forward of {request.request_id}")
                block[part] = new

    def _bytes_of(self, request: BedRequest, group: int, index: int, tokens: range) -> tuple[slice, bytes]:
        """Position in the block of that index, and right bytes, of these tokens."""
        spec = self._groups[group]
        if spec.kind is GroupKind.SSM:
            return slice(0, spec.block_tokens * TOKEN_BYTES), request.state(group, tokens.stop, spec.block_tokens)
        first = index * spec.block_tokens
        part = slice((tokens.start - first) * TOKEN_BYTES, (tokens.stop - first) * TOKEN_BYTES)
        return part, request.kv(group, tokens.start, tokens.stop)
