"""The namespace: everything that makes KV bytes interchangeable, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

KV_FORMAT_VERSION = 2
"""Bumped when the bytes inside a chunk's payload are arranged otherwise, or when what must agree about them changes.

2: what a group attends to is part of the namespace.
"""

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """Two processes may share KV bytes exactly when all of these are equal.

    ``groups`` holds, per KV cache group, (tokens per GPU block, bytes of one block in each tensor, worker by worker,
    what it attends to, tokens of its window or None). The last two count because a chunk is stored without the blocks
    that a window has left behind: to a group that attends to more, the zeros in their place would be wrong bytes.
    ``epoch`` is the user's: bump it when weights change under the same name.

    ``replica`` says nothing of the bytes: it keeps apart the places of engines that are alike in all the rest, in tiers
    that one process at a time may open. The first one's, 0, is left out of what describes the namespace, so that an
    engine that gets replicas keeps its place.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    groups: tuple[tuple[int, tuple[int, ...], str, int | None], ...]
    blocks_per_chunk: int
    hash_block_tokens: int
    rank: int = 0
    world_size: int = 1
    epoch: str = "0"
    kv_format: int = KV_FORMAT_VERSION
    replica: int = 0

    def describe(self) -> dict[str, object]:
        """The fields as plain JSON values, for manifests and messages."""
        fields = asdict(self)
        if not self.replica:
            del fields["replica"]
        return fields

    def fingerprint(self) -> bytes:
        """Sixteen bytes that stand for all fields. Canonical JSON keeps it equal across versions of Python."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES, person=b"tierkv-namespace").digest()
