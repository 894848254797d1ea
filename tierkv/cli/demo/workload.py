"""Conversations of the demo: several turns of many users, who share a few system prompts. Seeded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Sizes of the workload."""

    conversations: int = 10
    """Number of conversations."""
    system_prompts: int = 2
    """Number of system prompts."""
    turns: int = 2
    """Turns before the restart. One more turn follows in the new process."""
    system_tokens: int = 192
    """Length of a system prompt in tokens."""
    user_tokens: int = 128
    """Mean length of a user message in tokens; lengths vary by a quarter."""
    answer_tokens: int = 12
    """Generated tokens per turn."""
    vocab: int = 512
    """Size of the vocabulary."""
    seed: int = 0
    """Seed of the conversations."""


@dataclass(slots=True)
class Conversation:
    """Conversation of one user. ``history`` grows with each message and answer."""

    name: str
    history: list[int]
    messages: list[list[int]] = field(default_factory=list)

    def prompt(self, turn: int) -> list[int]:
        """Prompt of a turn: the history and the next message."""
        return self.history + self.messages[turn]

    def add_answer(self, turn: int, answer: list[int]) -> None:
        """Add message and answer of a turn to the history."""
        self.history = self.prompt(turn) + answer


def make_conversations(config: WorkloadConfig) -> list[Conversation]:
    """Create all conversations before their first turn. Deterministic for a configuration."""
    rng = random.Random(config.seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(1, config.vocab) for _ in range(length)]

    systems = [text(config.system_tokens) for _ in range(config.system_prompts)]
    spread = max(1, config.user_tokens // 4)
    return [
        Conversation(
            name=f"user-{i:02d}",
            history=list(systems[i % config.system_prompts]),
            messages=[text(config.user_tokens + rng.randrange(-spread, spread)) for _ in range(config.turns + 1)],
        )
        for i in range(config.conversations)
    ]
