"""GPU blocks as the core reads them, for tests that pass block tables by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BedBlock:
    """A block as the core sees it; satisfies :class:`tierkv.types.engine.Block`."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def blocks(ids: Sequence[int], filled: int = 0) -> list[BedBlock]:
    """Table of blocks, the first ``filled`` of them computed; id 0 is the null block."""
    return [BedBlock(block_id, b"computed" if i < filled else None, block_id == 0) for i, block_id in enumerate(ids)]
