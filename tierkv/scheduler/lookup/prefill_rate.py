"""Prefill of the engine: its rate, as given or as measured from its steps, and the tokens that wait for it. Sans-IO."""

from __future__ import annotations

from collections import deque

from tierkv.scheduler.requests.record import RequestRecord

PREFILL_TOKENS_MIN = 64
"""Steps that compute fewer prompt tokens are not measured."""

LONG_STEP_TOKENS = 512
"""Prompt tokens from which on a step shows the rate. The fixed cost of a shorter one outweighs it: it shows less."""

SAMPLES_MIN, SAMPLES_MAX = 2, 31
"""Number of measured steps from which the rate is known, and number of steps kept."""

MEDIAN_SAMPLES_MIN = 5
"""Number of measured steps from which their median is the rate. Of fewer, the slowest counts: it loads most."""


class PrefillRate:
    """Prompt tokens that the engine computes per second.

    An engine may begin a step while the one before it is still computed, as vLLM does on a GPU. So the time of a step
    is the longer one of two intervals: from its begin to the next step, and from there to the one after it. A step that
    computes fewer tokens than one of its neighbours is not measured, because their time may be in these intervals.

    Args:
        given: the engine's own figure, tokens per second. With one, nothing is measured.
    """

    def __init__(self, given: float | None = None) -> None:
        self._given = given if given is not None and given > 0 else None
        self._long: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._all: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._began_at_s: float | None = None
        self._tokens = 0
        self._previous_tokens = 0  # of the two latest steps that have ended
        self._latest_tokens = 0
        self._latest_s = 0.0
        self._expected_tokens = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens per second; None while unknown.

        The median of the latest steps, so that neither a slow step nor a pause after one changes it. An engine that
        computes short prompts only is faster than this says, so more of a hit is loaded than would be best.
        """
        samples = self._samples
        if self._given is not None or len(samples) < SAMPLES_MIN:
            return self._given
        return sorted(samples)[len(samples) // 2 if len(samples) >= MEDIAN_SAMPLES_MIN else 0]

    @property
    def is_known(self) -> bool:
        """Whether there is a rate."""
        return self._given is not None or len(self._samples) >= SAMPLES_MIN

    @property
    def _samples(self) -> deque[float]:
        """Rates of long steps; while there are too few of these, of all."""
        return self._long if len(self._long) >= SAMPLES_MIN else self._all

    def step_began(self, now_s: float) -> None:
        """Begin a step, and measure the previous one."""
        if self._began_at_s is not None and self.is_measuring:
            self.measured(self._tokens, now_s - self._began_at_s)
        self._began_at_s, self._tokens = now_s, 0

    def measured(self, prompt_tokens: int, seconds: float) -> None:
        """Measure a step: the prompt tokens that it computes, and the time until the next step. In order, with no gap.

        Steps that compute fewer than :data:`PREFILL_TOKENS_MIN` may be left out while :attr:`is_measuring` is false.
        """
        before, tokens = self._previous_tokens, self._latest_tokens
        took_s = max(self._latest_s, seconds)
        if tokens >= max(PREFILL_TOKENS_MIN, before, prompt_tokens) and took_s > 0 and self._given is None:
            self._all.append(tokens / took_s)
            if tokens >= LONG_STEP_TOKENS:
                self._long.append(tokens / took_s)
        self._previous_tokens, self._latest_tokens, self._latest_s = tokens, prompt_tokens, seconds

    @property
    def is_measuring(self) -> bool:
        """Whether the time until the next step counts for this one or for the previous one."""
        return self._given is None and max(self._tokens, self._latest_tokens) >= PREFILL_TOKENS_MIN

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
