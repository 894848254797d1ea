"""Workload: conversations that share system prompts, one-shot prompts between them. Seeded; pure.

What an assistant would have answered is made up too, so that every stack gets the same prompts to the token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPECIAL_TOKENS = 3
"""Reserved token ids of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in chunks; pairs are minimum and maximum.

    personas: system prompts, each shared by its conversations. odd_tokens: what every prompt has beyond whole chunks.
    """

    personas: int
    persona_chunks: int
    conversations: int
    turns: tuple[int, int]
    turn_chunks: tuple[int, int]
    one_shots: int
    one_shot_chunks: tuple[int, int]
    output_tokens: int
    odd_tokens: int = 5

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Shape:
        """Convert JSON lists to pairs."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. after: the request that must have ended before it is sent, as a user reads an answer first."""

    name: str
    tokens: tuple[int, ...]
    after: str | None = None


class Texts:
    """Token sequences by name: the same name and seed give the same text."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._seed = seed
        self._tokens = range(_SPECIAL_TOKENS, vocabulary)

    def text(self, name: str, length: int) -> tuple[int, ...]:
        """Make ``count`` tokens."""
        return tuple(random.Random(f"{self._seed} {name}").choices(self._tokens, k=length))


def single_prompts(name: str, count: int, length: int, texts: Texts) -> list[Prompt]:
    """Prompts of one length that share nothing; ``name`` distinguishes them from others."""
    return [Prompt(f"{name}-{number}", texts.text(f"{name} {number}", length)) for number in range(count)]


def workload(shape: Shape, chunk_tokens: int, texts: Texts, seed: int) -> list[Prompt]:
    """Order requests for sending: all first turns, all second turns and so on, one-shots anywhere between."""
    chance = random.Random(seed)
    length = shape.odd_tokens
    personas = [texts.text(f"persona {i}", shape.persona_chunks * chunk_tokens) for i in range(shape.personas)]
    rounds: list[list[Prompt]] = [[] for _ in range(shape.turns[1])]
    for number in range(shape.conversations):
        history, after = personas[number % shape.personas], None
        for turn in range(chance.randint(*shape.turns)):
            name = f"conversation-{number}.{turn}"
            said = texts.text(name, chance.randint(*shape.turn_chunks) * chunk_tokens)
            history += said
            rounds[turn].append(Prompt(name, history + texts.text(f"{name} end", length), after))
            after = name
    for turns in rounds:
        chance.shuffle(turns)
    prompts = [prompt for turns in rounds for prompt in turns]
    for number in range(shape.one_shots):
        chunks = chance.randint(*shape.one_shot_chunks)
        text = texts.text(f"one-shot {number}", chunks * chunk_tokens + length)
        prompts.insert(chance.randint(0, len(prompts)), Prompt(f"one-shot-{number}", text))
    return prompts


def distinct_chunks(prompts: list[Prompt], chunk_tokens: int) -> int:
    """Number of chunks with different content or a different prefix."""
    return len({prefix for prompt in prompts for prefix in _prefixes(prompt, chunk_tokens)})


def cacheable_tokens(prompts: list[Prompt], chunk_tokens: int) -> int:
    """Number of whole chunks: the hits of a cache that has seen every prompt."""
    return sum(len(prompt.tokens) // chunk_tokens * chunk_tokens for prompt in prompts)


def _prefixes(prompt: Prompt, chunk_tokens: int) -> list[int]:
    ends = range(chunk_tokens, len(prompt.tokens) + 1, chunk_tokens)
    return [hash(prompt.tokens[:end]) for end in ends]
