"""Right bytes of every token, block and chunk, so that a wrong byte is seen wherever it appears.

The KV bytes of a token in a group are a digest of all tokens up to it. So mixing up two requests, groups, positions or
generations of a block gives other bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key, split_key

TOKEN_BYTES = 4
"""KV bytes of one token in one group."""


def engine_spec(
    block_tokens: Sequence[int], hash_block_tokens: int, groups: Sequence[GroupSpec] | None = None
) -> EngineSpec:
    """Engine with one full-attention group per entry of ``block_tokens``, or with the given groups."""
    if groups is not None:
        return EngineSpec("model", "float32", tuple(groups), hash_block_tokens)
    groups = tuple(GroupSpec(size, (size * TOKEN_BYTES,)) for size in block_tokens)
    return EngineSpec("model", "float32", groups, hash_block_tokens)


MISSING = b"none"
"""In place of a token's bytes: its block was not there when the chunk was stored."""


def _tokens(payload: bytes) -> list[bytes]:
    return [payload[i : i + TOKEN_BYTES] for i in range(0, len(payload), TOKEN_BYTES)]


def link(parent: bytes, token: int) -> bytes:
    """Next hash of a chain."""
    return hashlib.blake2b(parent + token.to_bytes(8, "big"), digest_size=8).digest()


class BedRequest:
    """Request made of token numbers, which described events have.

    hashes_withheld: number of the last block hashes that the engine does not give yet (S5).
    """

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        hash_block_tokens: int,
        params: Mapping[str, Any] | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.kv_transfer_params = params
        self.num_prompt_tokens = len(tokens) if prompt_tokens is None else prompt_tokens
        self.hashes_withheld = 0
        self.all_token_ids: list[int] = []
        self.lora_id: int | None = None
        self.lora_name: str | None = None
        self._hash_block_tokens = hash_block_tokens
        self._chain: list[bytes] = []
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._chain)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per whole hash block, chained."""
        size = self._hash_block_tokens
        hashes = self._chain[size - 1 :: size]
        return hashes[: len(hashes) - self.hashes_withheld]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            parent = self._chain[-1] if self._chain else b""
            self._chain.append(link(parent, token))
            self.all_token_ids.append(token)

    def next_token(self) -> int:
        """Token that the model generates next."""
        return self.num_tokens

    def kv(self, group: int, start: int, stop: int) -> bytes:
        """KV bytes of tokens ``start`` to ``stop`` in a group."""
        suffix = group.to_bytes(4, "big")
        return b"".join(
            hashlib.blake2b(link + suffix, digest_size=TOKEN_BYTES).digest() for link in self._chain[start:stop]
        )

    def state(self, group: int, stop: int, block_tokens: int) -> bytes:
        """Content of a state space group's block after token ``stop - 1``: the state of that token, as large as a
        block.
        """
        return self.kv(group, stop - 1, stop) * block_tokens


class Truth:
    """Right payload of every chunk that any request of a run had."""

    def __init__(self, geometry: Geometry) -> None:
        self.payloads: dict[Key, bytes] = {}
        self._geometry = geometry

    def learn(self, request: BedRequest) -> None:
        """Add the current chunks of a request."""
        for group in self._geometry.groups:
            for i, key in enumerate(self.keys(request, group.index)):
                if key not in self.payloads:
                    start, stop, size = i * group.chunk_tokens, (i + 1) * group.chunk_tokens, group.block_tokens
                    if group.kind is GroupKind.SSM:
                        states = [request.state(group.index, end, size) for end in range(start + size, stop + 1, size)]
                        self.payloads[key] = b"".join(states)
                    else:
                        self.payloads[key] = request.kv(group.index, start, stop)

    def is_good(self, key: Key, payload: bytes) -> bool:
        """Whether these are the bytes of a chunk. A window's chunk may lack front blocks that no hit needs."""
        truth, group = self.payloads[key], self._geometry.groups[split_key(key)[1]]
        tail = group.tail_blocks * group.block_tokens * TOKEN_BYTES
        pieces = zip(_tokens(payload[:-tail]), _tokens(truth[:-tail]), strict=False)
        return (
            len(payload) == len(truth)
            and payload[-tail:] == truth[-tail:]
            and all(piece in (MISSING, right) for piece, right in pieces)
        )

    def keys(self, request: BedRequest, group: int = 0) -> list[Key]:
        """Chunk keys of a request in a group."""
        per_chunk = self._geometry.groups[group].hashes_per_chunk
        return [make_key(link, group) for link in request.block_hashes[per_chunk - 1 :: per_chunk]]


class Audit:
    """Readers and writers of each piece of memory. Overlap with a writer is an error of the core."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, int], set[str]] = {}
        self._writers: dict[tuple[str, int], str] = {}

    def begin_read(self, place: tuple[str, int], who: str) -> None:
        """Begin a read of ``place`` by ``who``."""
        assert place not in self._writers, f"{who} reads {place} while {self._writers[place]} writes it"
        self._readers.setdefault(place, set()).add(who)

    def begin_write(self, place: tuple[str, int], who: str) -> None:
        """Begin a write of ``place`` by ``who``."""
        assert place not in self._writers, f"{who} writes {place} while {self._writers[place]} writes it"
        assert not self._readers.get(place), f"{who} writes {place} while {self._readers[place]} read it"
        self._writers[place] = who

    def end_read(self, place: tuple[str, int], who: str) -> None:
        """Undo :meth:`begin_read`."""
        readers = self._readers[place]
        readers.remove(who)
        if not readers:
            del self._readers[place]

    def end_write(self, place: tuple[str, int], who: str) -> None:
        """Undo :meth:`begin_write`."""
        assert self._writers.pop(place) == who

    def touch(self, place: tuple[str, int], who: str) -> None:
        """Write ``place`` at this instant."""
        self.begin_write(place, who)
        self.end_write(place, who)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is read or written."""
        return not self._readers and not self._writers
