"""Namespace: all facts that make KV bytes interchangeable, and their fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KV_FORMAT_VERSION = 2
"""Version of the arrangement of bytes in a chunk's payload, and of the facts that must agree about them.

2: the attention of a group is part of the namespace.
"""

FINGERPRINT_BYTES = 16
PAYLOAD_BYTES_MAX = 1 << 40
"""Longest payload of a chunk in a description that is believed."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Facts about KV bytes. Two processes may share bytes exactly when all fields are equal."""

    model: str
    """Name of the model."""
    revision: str
    """Revision of the model."""
    dtype: str
    """Type of the KV values."""
    layout: str
    """Arrangement of values in a page."""
    groups: tuple[tuple[int, tuple[int, ...], str, int | None], ...]
    """Per KV cache group: tokens per GPU block; bytes of one block in each tensor, worker by worker; kind of attention;
    tokens of the window or None. Attention and window count because a chunk is stored without the blocks outside a
    window. For a group that attends to more, the zeros in their place would be wrong bytes."""
    blocks_per_chunk: int
    """GPU blocks per chunk."""
    hash_block_tokens: int
    """Tokens per hash block."""
    rank: int = 0
    """Share of the model."""
    world_size: int = 1
    """Number of shares."""
    epoch: str = "0"
    """Value that the user changes when weights change under the same name."""
    kv_format: int = KV_FORMAT_VERSION
    """Version of the payload format."""
    replica: int = 0
    """Number of the engine among equal engines. It does not affect the bytes. It separates their storage in tiers that
    only one process may open. The description omits replica 0, so a single engine that gets replicas keeps its data."""

    def describe(self) -> dict[str, object]:
        """Return the fields as plain JSON values, for manifests and messages."""
        fields = asdict(self)
        if not self.replica:
            del fields["replica"]
        return fields

    @classmethod
    def from_description(cls, described: object) -> Namespace:
        """Return the namespace with this description, as made by :meth:`describe`.

        Args:
            described: fields as from :meth:`describe`, read from JSON.

        Raises:
            ValueError: it describes no namespace that this version knows.
        """
        if not isinstance(described, Mapping):
            raise ValueError(f"not a description of a namespace: {described!r:.80}")  # noqa: TRY004 - bad content
        try:
            groups = tuple(
                (int(tokens), tuple(map(int, pages)), str(kind), None if window is None else int(window))
                for tokens, pages, kind, window in described["groups"]
            )
            found = cls(**{**described, "groups": groups})
            same = json.loads(json.dumps(found.describe())) == json.loads(json.dumps(described)) and all(
                type(getattr(found, field.name)).__name__ == field.type
                for field in fields(cls)
                if field.name != "groups"
            )
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # int() refuses infinity by the first
            raise ValueError(f"not a description of a namespace that this version knows: {error}") from error
        if not same:
            raise ValueError("not a description of a namespace that this version knows: a field has another type")
        if not found._has_chunks():
            raise ValueError("not a description of a namespace: its chunks have no size, or one that nothing has")
        return found

    def _has_chunks(self) -> bool:
        """Whether the sizes of all groups are those of chunks."""
        sizes = [size for tokens, pages, _, window in self.groups for size in (tokens, *pages, window or 1)]
        return (
            bool(self.groups)
            and all(pages for _, pages, _, _ in self.groups)
            and min(*sizes, self.blocks_per_chunk) > 0
            and self.payload_bytes_max <= PAYLOAD_BYTES_MAX
        )

    @property
    def payload_bytes_max(self) -> int:
        """Bytes of the largest chunk of any group."""
        return max(self.blocks_per_chunk * sum(pages) for _, pages, _, _ in self.groups)

    def is_other_division(self, described: object) -> bool:
        """Whether a description is of the same KV, in chunks with another number of parts.

        Args:
            described: fields as from :meth:`describe`, read from JSON. Anything else is no such description.
        """
        mine = json.loads(json.dumps(self.describe()))
        try:
            return described != mine and _undivided(described) == _undivided(mine)
        except (LookupError, TypeError, ValueError):
            return False

    def fingerprint(self) -> bytes:
        """Return a digest of all fields, 16 bytes. Canonical JSON makes it equal in all Python versions."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES, person=b"tierkv-namespace").digest()


def _undivided(described: Any) -> dict[str, Any]:  # noqa: ANN401 - read from a file
    """Return a description with the bytes of a whole block in place of those of its parts."""
    groups = [[tokens, sum(pages), *attention] for tokens, pages, *attention in described["groups"]]
    return {**described, "groups": groups}
