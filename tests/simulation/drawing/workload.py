"""Workload: arrivals with shared prefixes, continued conversations, and the engine's behaviour."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from random import Random

from simulation.drawing.run_spec import RunSpec
from simulation.engine.engine import EngineBehaviour
from simulation.engine.expected_bytes import SimRequest, User

Prompt = tuple[list[int], User]
"""Tokens and user."""

Arrival = tuple[list[int], User, int, dict[str, object] | None, int | None]
"""Prompt tokens, user, tokens to generate, parameters of the user, and tokens after which hashes repeat."""

OTHER_USER_SHARE = 0.3
"""Share of continued requests with another user, who must get none of the chunks."""

BUSY_PAUSE_S = 0.05
"""Average time between two steps of an engine that has requests."""

NEW_TOKENS = (1, 1, 1, 2, 10)
"""Tokens to generate; mostly few: what is decoded cannot be loaded."""

PARAMS: tuple[dict[str, object] | None, ...] = (
    *[None] * 24, {"max_offload_tokens": 0}, {"max_offload_tokens": 9},
    {"max_offload_tokens": -1}, {"max_offload_tokens": "all"}, {"something": "else"}, {"do_remote_decode": True},
    {"tierkv": {"load_tiers": ["host", "disk0"]}}, {"tierkv": {"max_load_tokens": 12}}, {"tierkv": {"store": False}},
    {"tierkv": {"store": ["host", "objects0"]}}, {"tierkv": {"ttl_s": 0.5}}, {"tierkv": {"one_shot": True}},
    {"tierkv": {"priority": 7, "retain": True, "session": "s", "continues": "yes"}}, {"tierkv": {"closed": True}},
    {"tierkv": {"ttl_s": "long", "priority": 7.5, "unheard": "of"}}, {"tierkv": "nonsense"},
)  # fmt: skip
"""Parameters of users; some are invalid."""


class Workload:
    """Draws of the users' and the engine's actions. loops: whether requests may have a chunk several times.

    Attributes:
        done: requests that came to their end.
    """

    def __init__(self, setup: RunSpec, rng: Random, *, loops: bool) -> None:
        self.done = 0
        self._may_loop = loops and not setup.caching
        self._setup = setup
        self._plan = setup.scenario
        self._rng = rng
        self._families = [
            [1000 * (family + 1) + i for i in range(setup.prompt_tokens_max)]
            for family in range(rng.choice(self._plan.families))
        ]
        self._conversations: deque[Prompt] = deque(maxlen=8)
        self._again: deque[Prompt] = deque(maxlen=16)
        self._unique = 100_000
        self._load = Random(f"load {setup.seed}")
        self._head_only = self._load.random() < self._plan.head_only
        self._full_steps = 0

    def pause_s(self) -> float:
        """Seconds until the next engine step."""
        if self._load.random() < self._plan.silent:
            return self._setup.deadline_s * self._load.uniform(1.1, 3.0)
        if self._rng.random() < self._plan.idle:
            return self._rng.uniform(0.5, 4.0)
        return self._rng.choice((0.001, 0.01, 0.01, 0.03, 0.1))

    def arrivals(self, waiting: int) -> list[Arrival]:
        """Draw the requests that arrive now."""
        rng, plan = self._rng, self._plan
        count = rng.randint(1, plan.burst_max) if rng.random() < plan.arrive else 0
        prompts = [self._again.popleft() for _ in range(len(self._again))]
        count = min(count, plan.waiting_max - waiting - len(prompts))
        if count > 1 and rng.random() < plan.crowd:  # they come for the same: one loads, the others find it
            shared = self._beginning()
            prompts += [self._grown(shared) for _ in range(count)]
        else:
            prompts += [self._grown(self._beginning()) for _ in range(count)]
        params: Sequence[dict[str, object] | None] = (None,) if plan.steady else PARAMS
        arrivals: list[Arrival] = []
        for tokens, user in prompts:
            loop_tokens = self._loop_tokens()
            if loop_tokens is not None:
                tokens = (tokens[:loop_tokens] * 3)[: len(tokens)]  # noqa: PLW2901 - the same prompt, as a loop
            arrivals.append((tokens, user, rng.choice(NEW_TOKENS), rng.choice(params), loop_tokens))
        return arrivals

    def _loop_tokens(self) -> int | None:
        """Tokens after which the hashes of a new request repeat: one or two chunks of every group."""
        if not self._may_loop or self._load.random() >= self._plan.loops:
            return None
        sizes = [group.block_tokens * self._setup.chunk_blocks for group in self._setup.engine.groups]
        return math.lcm(*sizes) * self._load.choice((1, 2))

    @property
    def prefixes(self) -> list[list[int]]:
        """All prefixes that requests share, whole."""
        return self._families

    def _beginning(self) -> Prompt:
        """Draw the beginning of a prompt: an earlier request, or a shared prefix."""
        if self._conversations and self._rng.random() < self._plan.back:
            tokens, user = self._rng.choice(self._conversations)
            return tokens, self.random_user() if self._rng.random() < OTHER_USER_SHARE else user
        return self.prefix(), self.random_user()

    def random_user(self) -> User:
        """Draw a user."""
        return self._rng.choice(self._setup.users)

    def _grown(self, beginning: Prompt) -> Prompt:
        tokens, user = beginning
        return [*tokens, *self._own(self._rng.choice((0, 0, 1, 5)))][: self._setup.prompt_tokens_max], user

    def prefix(self) -> list[int]:
        """Draw a prefix of one of the shared prompts."""
        family = self._rng.choice(self._families)
        length = self._rng.choice((len(family), len(family), self._rng.randint(1, len(family))))
        return family[:length]

    def _own(self, count: int) -> list[int]:
        self._unique += count
        return list(range(self._unique, self._unique + count))

    def finished(self, request: SimRequest) -> None:
        """Note a finished request, which its user may continue."""
        self.done += 1
        if request.loop_tokens is None:
            self._conversations.append((list(request.tokens), request.user))

    def resubmit(self, request: SimRequest) -> None:
        """Submit a request again, because its process died."""
        self._again.append((request.tokens[: request.num_prompt_tokens], request.user))

    def behaviour(self) -> EngineBehaviour:
        """Draw the engine's behaviour in the next step."""
        rng, workers = self._rng, self._setup.engine.num_workers
        return EngineBehaviour(
            asks=self._asks(),
            accepts=rng.choice((1.0, 1.0, 1.0, 1.0, 1.0, 0.5)),
            preempt=int(rng.random() < self._plan.preempt),
            forward_s=rng.choice((0.0, 0.002, 0.02)),
            silent=frozenset(rank for rank in range(workers) if workers > 1 and rng.random() < 0.2),
            refuses_first=rng.random() < self._plan.refuses_first,
            filling=rng.randrange(256),
        )

    def _asks(self) -> int:
        """Number of waiting requests that the engine considers in the next step."""
        asks = self._rng.choice((0, 1, 100, 100, 100, 100, 100, 100))
        if self._load.random() < self._plan.full:
            self._full_steps = int(self._setup.deadline_s / BUSY_PAUSE_S * self._load.uniform(1.0, 3.0))
        if self._full_steps:
            self._full_steps -= 1
            return 0
        return min(asks, 1) if self._head_only else asks

    def calm_behaviour(self) -> EngineBehaviour:
        """Behaviour of an engine without refusals or preemptions."""
        return EngineBehaviour(filling=self._rng.randrange(256))
