"""Right bytes of a run: a pure function of the previous tokens, the group, the worker and the weights.

So any piece of KV memory can be checked, and only tokens are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simulation.engine.approximations import VALUE_BYTES, Approximations, NoApproximations
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key, make_scope, split_key

TOKEN_BYTES = 4
"""KV bytes of one token in one tensor of one worker."""

PARTS_MAX = 64 // TOKEN_BYTES
"""Largest number of tensors of all workers together: the size of one digest."""


class User(NamedTuple):
    """User of a request, with adapter. Other users' bytes for the same tokens are other bytes."""

    cache_salt: str | None = None
    lora_name: str | None = None


ANONYMOUS = User()


class SimRequest:
    """Request; satisfies :class:`tierkv.types.engine.Request`.

    Args:
        scoped_hashes: the engine's hashes tell apart who asks. If not, tierkv must.
        loop_tokens: number of tokens after which hashes and bytes begin again as at the first one, so that a request
            whose tokens repeat has the same chunk several times; None: never, as in real engines.

    Attributes:
        tokens: prompt, then what was generated.
        chain: one digest per token, over it, all before it, and who asks.
    """

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        hash_block_tokens: int,
        params: Mapping[str, Any] | None,
        user: User = ANONYMOUS,
        *,
        scoped_hashes: bool = True,
        loop_tokens: int | None = None,
    ) -> None:
        self.loop_tokens = loop_tokens
        self.request_id = request_id
        self.num_prompt_tokens = len(tokens)
        self.kv_transfer_params = params
        self.cache_salt, self.lora_name = self.user = user
        self.scope = make_scope(*user)
        self.block_hashes: list[bytes] = []
        self.tokens: list[int] = []
        self.chain: list[bytes] = []
        self._last_hash = self._last_link = b"root"
        if user != ANONYMOUS:
            self._last_link += repr(tuple(user)).encode()
        if scoped_hashes:
            self._last_hash = self._last_link
        self._first = self._last_hash, self._last_link
        self._hash_block_tokens = hash_block_tokens
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            if self.loop_tokens and len(self.tokens) % self.loop_tokens == 0:
                self._last_hash, self._last_link = self._first
            same = self._last_hash == self._last_link
            self._last_link = _next_link(self._last_link, token)
            self._last_hash = self._last_link if same else _next_link(self._last_hash, token)
            self.chain.append(self._last_link)
            self.tokens.append(token)
            if len(self.tokens) % self._hash_block_tokens == 0:
                self.block_hashes.append(self._last_hash)

    def next_token(self) -> int:
        """Token that the model generates next; equal for equal tokens."""
        return self.chain[-1][0] % 5


def _next_link(link: bytes, token: int) -> bytes:
    return hashlib.blake2b(link + token.to_bytes(4, "big"), digest_size=16).digest()


def _without_front(payload: bytes, parts: int, missing: int) -> bytes:
    """Payload whose parts lack their first ``missing`` bytes."""
    size = len(payload) // parts
    return b"".join(bytes(missing) + payload[i * size + missing : (i + 1) * size] for i in range(parts))


class Truth:
    """Right bytes of all requests of a run.

    Args:
        geometry: sizes.
        epoch: which weights: other ones give other bytes for the same tokens.
        approximations: which other bytes a lossy codec may make of them.
    """

    def __init__(self, geometry: Geometry, epoch: str, approximations: Approximations | None = None) -> None:
        self.geometry = geometry
        self.epoch = epoch
        self.approximations = approximations or NoApproximations()
        self.payloads: dict[Key, bytes] = {}
        self._near: dict[Key, bytes] = {}
        self._chains: dict[Key, Sequence[bytes]] = {}  # of the tokens of each chunk
        self._near_tokens: dict[tuple[bytes, int], set[bytes]] = {}
        self._digests: dict[tuple[bytes, int], bytes] = {}
        self._salt = hashlib.blake2b(epoch.encode(), digest_size=16).digest()

    def tensor_bytes(self, request: SimRequest, group: int, part: int, start: int, stop: int) -> bytes:
        """KV bytes of tokens ``start`` to ``stop``. ``part`` counts tensors, worker by worker, without copies."""
        span = slice(part * TOKEN_BYTES, (part + 1) * TOKEN_BYTES)
        return b"".join(self._digest(link, group)[span] for link in request.chain[start:stop])

    def _digest(self, link: bytes, group: int) -> bytes:
        digest = self._digests.get((link, group))
        if digest is None:
            text = link + group.to_bytes(2, "big")
            random = hashlib.blake2b(text, key=self._salt, digest_size=64).digest()
            digest = self._digests[link, group] = self.approximations.plausible(random)
        return digest

    def keys(self, request: SimRequest, group: int) -> list[Key]:
        """Keys of a request's whole chunks."""
        per_chunk = self.geometry.groups[group].hashes_per_chunk
        hashes = request.block_hashes[per_chunk - 1 :: per_chunk]
        return [make_key(block_hash, group, request.scope) for block_hash in hashes]

    def is_right(self, key: Key, found: bytes) -> bool:
        """Whether these bytes are the payload of a chunk.

        Of a window, the front blocks of a chunk may be missing, and are zeros then: no token attends to them any more.
        """
        right = self.payloads[key]
        if found == right or self.approximations.agree(found, right, self._near[key]):
            return True
        if self._near_tokens and self._are_right_tokens(key, found):
            return True
        group = self.geometry.groups[split_key(key)[1]]
        blocks = self.geometry.blocks_per_chunk
        if group.window_chunks is None or blocks == 1:
            return False
        parts = len(group.page_bytes) * group.parts
        block_bytes = len(right) // parts // blocks
        return any(_without_front(right, parts, skip * block_bytes) == found for skip in range(1, blocks))

    def are_right(self, found: bytes, request: SimRequest, group: int, part: int, start: int) -> bool:
        """Whether these bytes are the KV of tokens from ``start`` on, some of them perhaps from a lossy tier."""
        tokens = range(0, len(found), TOKEN_BYTES)
        return all(
            self._is_right_token(request.chain[start + at // TOKEN_BYTES], group, part, found[at : at + TOKEN_BYTES])
            for at in tokens
        )

    def _are_right_tokens(self, key: Key, found: bytes) -> bool:
        """Whether these bytes are a chunk whose front the GPU had from another one, with the same first tokens.

        A lossy tier may have rounded that one in another way: its values may share a scale.
        """
        chain, group = self._chains[key], split_key(key)[1]
        return all(
            self._is_right_token(
                chain[number % len(chain)],
                group,
                number // len(chain),
                found[number * TOKEN_BYTES : (number + 1) * TOKEN_BYTES],
            )
            for number in range(len(found) // TOKEN_BYTES)
        )

    def _is_right_token(self, link: bytes, group: int, part: int, found: bytes) -> bool:
        """Whether each value of a token is the right one, or one that a lossy tier may have made of it."""
        span = slice(part * TOKEN_BYTES, (part + 1) * TOKEN_BYTES)
        rows = [self._digest(link, group)[span], *(row[span] for row in self._near_tokens.get((link, group), ()))]
        return all(
            any(row[at : at + VALUE_BYTES] == found[at : at + VALUE_BYTES] for row in rows)
            for at in range(0, TOKEN_BYTES, VALUE_BYTES)
        )

    def learn(self, request: SimRequest) -> None:
        """Compute the payloads of all whole chunks of a request."""
        for group in self.geometry.groups:
            parts = len(group.page_bytes) * group.parts
            for i, key in enumerate(self.keys(request, group.index)):
                if key not in self.payloads:
                    start, stop = i * group.chunk_tokens, (i + 1) * group.chunk_tokens
                    payload = b"".join(
                        self.tensor_bytes(request, group.index, part, start, stop) for part in range(parts)
                    )
                    near = self.approximations.learn(payload)
                    self.payloads[key], self._near[key] = payload, near
                    self._chains[key] = request.chain[start:stop]
                    if near != payload:
                        self._learn_tokens(request.chain[start:stop], group.index, near)

    def _learn_tokens(self, chain: Sequence[bytes], group: int, near: bytes) -> None:
        """Note the approximate bytes of each token of a chunk, in the order of the parts."""
        part_bytes = len(chain) * TOKEN_BYTES
        for number, link in enumerate(chain):
            places = range(number * TOKEN_BYTES, len(near), part_bytes)
            row = b"".join(near[place : place + TOKEN_BYTES] for place in places)
            self._near_tokens.setdefault((link, group), set()).add(row)

    def take_over(self, before: Truth) -> None:
        """Take over what another process with the same weights has computed."""
        self.payloads.update(before.payloads)
        self._near.update(before._near)
        self._chains.update(before._chains)
        for name, rows in before._near_tokens.items():
            self._near_tokens.setdefault(name, set()).update(rows)
