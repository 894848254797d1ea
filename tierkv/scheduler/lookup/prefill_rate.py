"""Prefill of the engine: its rate, as given or as measured from its steps, and the tokens that wait for it. Sans-IO."""

from __future__ import annotations

from collections import deque

from tierkv.scheduler.requests.record import RequestRecord

PREFILL_TOKENS_MIN = 512
"""Steps that compute fewer prompt tokens are not measured: their fixed cost outweighs the rate."""

SAMPLES_MIN, SAMPLES_MAX = 5, 31
"""Number of measured steps from which the rate is known, and number of steps kept."""
"""Steps from which the rate is known, and steps that are remembered."""


class PrefillRate:
    """Prompt tokens that the engine computes per second.

    Args:
        given: the engine's own figure, tokens per second. With one, nothing is measured.
    """

    def __init__(self, given: float | None = None) -> None:
        self._given = given if given is not None and given > 0 else None
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._began_at_s: float | None = None
        self._tokens = 0
        self._expected_tokens = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens per second; None while unknown.

        The median of the latest steps, so that neither a slow step nor a pause after one changes it.
        """
        if self._given is not None or len(self._samples) < SAMPLES_MIN:
            return self._given
        return sorted(self._samples)[len(self._samples) // 2]

    @property
    def is_known(self) -> bool:
        """Whether there is a rate."""
        return self._given is not None or len(self._samples) >= SAMPLES_MIN

    def step_began(self, now_s: float) -> None:
        """Begin a step, and measure the previous one, which has ended."""
        if self._began_at_s is not None and self._tokens:
            self.measured(self._tokens, now_s - self._began_at_s)
        self._began_at_s, self._tokens = now_s, 0

    def measured(self, prompt_tokens: int, seconds: float) -> None:
        """Measure a step that has ended: the prompt tokens that it computed, and its duration."""
        if prompt_tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            self._samples.append(prompt_tokens / seconds)

    @property
    def is_measuring(self) -> bool:
        """Whether the current step computes enough prompt tokens to be measured."""
        return self._given is None and self._tokens >= PREFILL_TOKENS_MIN

    def step_computes(self, prompt_tokens: int) -> None:
        """Add prompt tokens that the current step computes."""
        self._tokens += prompt_tokens

    def expect(self, record: RequestRecord, tokens: int) -> None:
        """Note that ``tokens`` of a request are still to be computed, in place of what was noted before."""
        self._expected_tokens += tokens - record.prefill_tokens
        record.prefill_tokens = tokens

    def expected_for_others(self, record: RequestRecord) -> int:
        """Tokens that are still to be computed for all other requests."""
        return self._expected_tokens - record.prefill_tokens
