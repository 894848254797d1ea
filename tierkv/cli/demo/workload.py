"""The conversations of the demo: a few system prompts shared by many users, several turns each. Seeded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Sizes in tokens where not said otherwise.

    conversations, system_prompts, turns: how many. turns: before the break; one more follows in the new process.
    system_tokens, user_tokens: lengths; user messages vary by a quarter of theirs.
    answer_tokens: generated per turn.
    """

    conversations: int = 10
    system_prompts: int = 2
    turns: int = 2
    system_tokens: int = 192
    user_tokens: int = 128
    answer_tokens: int = 12
    vocab: int = 512
    seed: int = 0


@dataclass(slots=True)
class Conversation:
    """One user's conversation so far. ``history`` grows by each message and each answer."""

    name: str
    history: list[int]
    messages: list[list[int]] = field(default_factory=list)

    def say(self, turn: int) -> list[int]:
        """The prompt of a turn: everything so far and the user's next message."""
        return self.history + self.messages[turn]

    def hear(self, turn: int, answer: list[int]) -> None:
        """Take the answer of a turn into the history."""
        self.history = self.say(turn) + answer


def make_conversations(config: WorkloadConfig) -> list[Conversation]:
    """All conversations, before their first turn. The same for the same config."""
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
