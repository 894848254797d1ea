"""What travels to and from the processes of the demo. No torch: the parent process never loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tierkv.cli.demo.workload import Conversation
from tierkv.errors import TierKVError
from tierkv.reference.configs import EngineConfig
from tierkv.types.cache_events import CacheEvent, CacheEventKind

Progress = Callable[[int], None]
"""Called with the number of requests done so far."""


class PhaseFailedError(TierKVError):
    """A phase of the demo ended without a result."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One process' work: serve ``turns`` of ``conversations`` in order.

    stack: description of the stack, or None to serve without tierkv. one_by_one: requests arrive one after the other,
    as those of a returning user do; else all of a turn arrive together. verify_frames: see ``open_stack``.
    """

    name: str
    engine: EngineConfig
    conversations: list[Conversation]
    turns: tuple[int, ...]
    answer_tokens: int
    stack: dict[str, Any] | None = None
    one_by_one: bool = False
    verify_frames: bool = True


@dataclass(frozen=True, slots=True)
class Served:
    """One request, served. Times in seconds; counts in tokens."""

    conversation: str
    turn: int
    prompt_tokens: int
    answer: list[int]
    ttft_s: float
    tokens_computed: int
    tokens_loaded: int
    tokens_cached: int
    deferrals: int
    loaded_by_tier: dict[str, int]


@dataclass(slots=True)
class PhaseResult:
    """What a phase did.

    worker_pids: the processes of the ranks, if they had any. keys_at_rest: per tier, what it held when the phase ended.
    """

    name: str
    pid: int
    worker_pids: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    bytes_stored: int = 0
    bytes_loaded: int = 0
    keys_at_rest: dict[str, set[bytes]] = field(default_factory=dict)
    flushed: bool = True

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Keep book of what each tier holds."""
        for event in events:
            keys = self.keys_at_rest.setdefault(event.tier, set())
            if event.kind is CacheEventKind.STORED:
                keys.update(event.keys)
            else:
                keys.difference_update(event.keys)
