"""Messages to and from the processes of the demo. Does not import torch, which the parent process never loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tierkv.cli.demo.workload import Conversation
from tierkv.errors import TierKVError
from tierkv.reference.configs import EngineConfig
from tierkv.types.cache_events import CacheEvent, CacheEventKind

Progress = Callable[[int], None]
"""Function called with the number of finished requests."""


class PhaseFailedError(TierKVError):
    """A phase of the demo ended without a result."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Work of one process: serve ``turns`` of ``conversations`` in order."""

    name: str
    """Name of the phase."""
    engine: EngineConfig
    """The engine."""
    conversations: list[Conversation]
    """Conversations to continue."""
    turns: tuple[int, ...]
    """Turns to serve."""
    answer_tokens: int
    """Tokens to generate per turn."""
    stack: dict[str, Any] | None = None
    """Description of the stack; None to serve without tierkv."""
    one_by_one: bool = False
    """Whether requests arrive one after the other. Otherwise all requests of a turn arrive together."""
    verify_frames: bool = True
    """Argument of ``open_stack``."""


@dataclass(frozen=True, slots=True)
class Served:
    """Result of one request. Times are in seconds, counts in tokens."""

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
    """Report of the process that ran a phase; it pickles."""

    name: str
    pid: int
    worker_pids: list[int] = field(default_factory=list)
    """Processes of the ranks, if any."""
    served: list[Served] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    bytes_stored: int = 0
    bytes_loaded: int = 0
    keys_at_rest: dict[str, set[bytes]] = field(default_factory=dict)
    """Stored keys per tier at the end of the phase."""
    flushed: bool = True

    def note(self, events: Iterable[CacheEvent]) -> None:
        """Update the stored keys of each tier."""
        for event in events:
            keys = self.keys_at_rest.setdefault(event.tier, set())
            if event.kind is CacheEventKind.STORED:
                keys.update(event.keys)
            else:
                keys.difference_update(event.keys)
