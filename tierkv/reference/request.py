"""Request of the reference engine: its tokens and hashes, its state, and its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tierkv.errors import IllegalTransitionError
from tierkv.reference.block_pool import Block, chained_hash, root_hash
from tierkv.reference.configs import EngineConfig


class RequestState(Enum):
    """Stages of a request in the reference scheduler."""

    WAITING = "waiting"
    """In the queue; holds no blocks."""
    LOADING = "loading"
    """Holds its blocks while the connector fills them; not run."""
    RUNNING = "running"
    """Holds its blocks; computed whenever the step's budget reaches it."""
    FINISHED = "finished"
    """Generated all requested tokens, or aborted."""


_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.LOADING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    # Preempted requests wait again.
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True)
class RequestRecord:
    """Outcome of a request. Times are in seconds on the engine's clock; counts grow again after a preemption."""

    request_id: str
    index: int
    """Number of the request, by arrival."""
    num_prompt_tokens: int
    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    tokens_computed: int = 0
    """Positions run through the model."""
    tokens_loaded: int = 0
    """Positions that the connector loaded."""
    tokens_cached: int = 0
    """Positions that the engine's own prefix cache had."""
    deferrals: int = 0
    """Steps in which the connector had no answer yet."""
    preemptions: int = 0
    aborted: bool = False
    output_tokens: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, or None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


class Request:
    """Request, with tokens for described events. The rest is for scheduler and engine alone."""

    def __init__(  # noqa: PLR0913, PLR0917 - all that a caller can say of a request
        self,
        config: EngineConfig,
        record: RequestRecord,
        prompt: Sequence[int],
        max_new_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.record = record
        self.max_new_tokens = max_new_tokens
        self.num_computed_tokens = 0
        self.load_end_tokens = 0
        """End of the tokens being loaded."""
        self.tables: list[list[Block]] = [[] for _ in range(config.num_groups)]
        self.blocks_reported = 0
        """Blocks per group that the connector has been passed; 0: it gets the whole table next."""
        self._state = RequestState.WAITING
        self._tokens = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._kv_transfer_params = kv_transfer_params
        self._block_tokens = config.block_tokens
        self._cache_salt = cache_salt
        self._root = root_hash(config.hash_salt if cache_salt is None else f"{config.hash_salt}/{cache_salt}")
        self._block_hashes: list[bytes] = []
        self._extend_hashes()

    @property
    def request_id(self) -> str:
        """Id that the caller gave or received."""
        return self.record.request_id

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far."""
        return self._tokens

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far, under the name that self-describing events read."""
        return self._tokens

    @property
    def cache_salt(self) -> str | None:
        """Salt of the request's block hashes."""
        return self._cache_salt

    @property
    def lora_id(self) -> int | None:
        """None: this engine has no adapters."""
        return None

    @property
    def lora_name(self) -> str | None:
        """None: this engine has no adapters."""
        return None

    @property
    def num_tokens(self) -> int:
        """Length of prompt and output so far."""
        return len(self._tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._num_prompt_tokens

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One per full block of tokens, whether computed or not; grows with the output."""
        return self._block_hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters of the caller for the connector."""
        return self._kv_transfer_params

    @property
    def state(self) -> RequestState:
        """Current state."""
        return self._state

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Ids of its blocks, per group."""
        return tuple(tuple(block.block_id for block in table) for table in self.tables)

    @property
    def is_complete(self) -> bool:
        """Whether all requested tokens are generated."""
        return len(self.record.output_tokens) >= self.max_new_tokens

    def become(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            IllegalTransitionError: the table above does not list this change.
        """
        if state not in _NEXT[self._state]:
            raise IllegalTransitionError(f"request {self.request_id!r} cannot go from {self._state} to {state}")
        self._state = state

    def append(self, token: int) -> None:
        """Add a generated token."""
        self._tokens.append(token)
        self.record.output_tokens.append(token)
        self._extend_hashes()

    def _extend_hashes(self) -> None:
        size = self._block_tokens
        for i in range(len(self._block_hashes), len(self._tokens) // size):
            parent = self._block_hashes[-1] if i else self._root
            self._block_hashes.append(chained_hash(parent, self._tokens[i * size : (i + 1) * size]))
