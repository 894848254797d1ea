"""How fast the engine computes prompts: as it says itself, or as its steps show. Sans-IO."""

from __future__ import annotations

from collections import deque

PREFILL_TOKENS_MIN = 512
"""A step that computes fewer prompt tokens tells more of its fixed cost than of the rate."""

SAMPLES_MIN, SAMPLES_MAX = 5, 31
"""Steps from which the rate is known, and steps that are remembered."""


class PrefillRate:
    """Args: ``given`` is the engine's own figure; with one nothing is measured."""

    def __init__(self, given: float | None = None) -> None:
        self._given = given if given is not None and given > 0 else None
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._began_at_s: float | None = None
        self._tokens = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens per second, or None while it is not known.

        The median of the last steps: neither one slow step nor a pause behind one moves it.
        """
        if self._given is not None or len(self._samples) < SAMPLES_MIN:
            return self._given
        return sorted(self._samples)[len(self._samples) // 2]

    def step_began(self, now_s: float) -> None:
        """A step begins, so the one before it has ended."""
        if self._began_at_s is not None and self._tokens >= PREFILL_TOKENS_MIN and now_s > self._began_at_s:
            self._samples.append(self._tokens / (now_s - self._began_at_s))
        self._began_at_s, self._tokens = now_s, 0

    def step_computes(self, prompt_tokens: int) -> None:
        """The step that has begun computes so many prompt tokens."""
        self._tokens += prompt_tokens
