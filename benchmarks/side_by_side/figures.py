"""Rows from the results of engine processes: figure, limit, ratio round by round. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.rows import Row
from benchmarks.side_by_side.jobs import BLOCK_TOKENS, Life, Sizes, StackName

Phase = Mapping[str, Any]
"""Phase as :class:`benchmarks.side_by_side.meters.Phase` and the driver write it."""
Round = Mapping[tuple[StackName, Life], Mapping[str, Phase]]
"""Phases by name, of each process of a round."""

MIB = 1 << 20
_BASELINES = {
    "alone, cold": "alone, cold",
    "alone, warm": "alone, warm",
    "alone, restarted": "alone, cold",
    "load, first pass": "load, first pass",
    "load, second pass": "load, second pass",
    "load, restarted": "load, first pass",
}
"""Phase -> the phase of an engine without offloading that does the same; after a restart its cache is empty."""
_LIVES = {name: Life.RESTART if name.endswith("restarted") else Life.FIRST for name in _BASELINES}
_STORED_BEFORE = ("alone, warm", "alone, restarted", "load, second pass", "load, restarted")
"""Phases in which every prompt has been served once, so that all whole chunks could come from a tier."""
_READING = ("alone, restarted", "load, second pass", "load, restarted")


def rows(rounds: Sequence[Round], stacks: Sequence[StackName], sizes: Sizes) -> Iterator[Row]:
    """Rows measure by measure, the stacks beside each other in each."""
    offloading = [stack for stack in stacks if stack is not StackName.NONE]
    figures = Figures(rounds, sizes)
    for phase in _BASELINES:
        yield from (figures.first_token(phase, stack) for stack in offloading)
    for phase in ("load, first pass", *_STORED_BEFORE):
        yield from (figures.cached(phase, stack) for stack in offloading)
    for phase in ("load, first pass", "load, second pass", "load, restarted"):
        yield from (figures.step(phase, stack) for stack in offloading)
    for phase in _READING:
        yield from (figures.read(phase, stack) for stack in offloading)
    for phase in ("load, first pass", "load, second pass", "load, restarted"):
        yield from (figures.lookups(phase, stack) for stack in offloading)
    for name, chunks in (("long", sizes.long_chunks), ("longer by one", sizes.long_host_chunks + 1)):
        yield from (figures.long(name, chunks, stack) for stack in offloading)


class Figures:
    """Rows, one at a time; medians over the rounds, ratios within a round."""

    def __init__(self, rounds: Sequence[Round], sizes: Sizes) -> None:
        self._rounds = rounds
        self._sizes = sizes

    def first_token(self, phase: str, stack: StackName) -> Row:
        """Seconds to the first token, the median of a phase's requests."""
        ours = [first_token_ms(one) for one in self._phases(phase, stack)]
        bare = [first_token_ms(one) for one in self._baselines(phase)]
        return Row(
            f"first token, {phase}: {stack.value}",
            "ms",
            median(ours),
            StackName.NONE.value,
            median(bare),
            [a / b for a, b in zip(ours, bare, strict=True)],
            extra={
                "slowest request, ms": median(first_token_ms(one, max) for one in self._phases(phase, stack)),
                "whole phase, s": median(one["wall_s"] for one in self._phases(phase, stack)),
                "whole phase without offloading, s": median(one["wall_s"] for one in self._baselines(phase)),
            },
        )

    def cached(self, phase: str, stack: StackName) -> Row:
        """Tokens that were not computed: from the engine's own cache or a tier."""
        ours = [cached_tokens(one) for one in self._phases(phase, stack)]
        if phase in _STORED_BEFORE:
            limit_name, limits = (
                "whole chunks of all prompts",
                [cacheable_tokens(one) for one in self._phases(phase, stack)],
            )
        else:
            limit_name, limits = StackName.NONE.value, [cached_tokens(one) for one in self._baselines(phase)]
        pairs = zip(self._phases(phase, stack), self._baselines(phase), strict=True)
        return Row(
            f"cached, {phase}: {stack.value}",
            "tokens",
            median(ours),
            limit_name,
            median(limits),
            [a / b for a, b in zip(ours, limits, strict=True)],
            extra={
                "from a tier, tokens": median(_counted(one, "tokens_loaded") for one in self._phases(phase, stack)),
                "answers as without offloading, %": median(_same_answers(a, b) for a, b in pairs),
            },
        )

    def step(self, phase: str, stack: StackName) -> Row:
        """Seconds of ``schedule`` and ``update_from_output`` of one step with work, connector included."""
        phases = self._phases(phase, stack)
        ours = [_microseconds(one, "scheduling", "median_s") for one in phases]
        bare = [_microseconds(one, "scheduling", "median_s") for one in self._baselines(phase)]
        asked = [one["asked"] for one in phases]
        total = [_scheduling_ms(one) / count for one, count in zip(phases, asked, strict=True)]
        before = [_scheduling_ms(one) / count for one, count in zip(self._baselines(phase), asked, strict=True)]
        return Row(
            f"scheduling of a step, {phase}: {stack.value}",
            "us",
            median(ours),
            StackName.NONE.value,
            median(bare),
            [a / b for a, b in zip(ours, bare, strict=True)],
            extra={
                "added, us": median(a - b for a, b in zip(ours, bare, strict=True)),
                "p99, us": median(_microseconds(one, "scheduling", "p99_s") for one in phases),
                "p99 without offloading, us": median(
                    _microseconds(one, "scheduling", "p99_s") for one in self._baselines(phase)
                ),
                "in connector calls, both sides, us": median(
                    _microseconds(one, "connector", "median_s") for one in phases
                ),
                "p99 of it, us": median(_microseconds(one, "connector", "p99_s") for one in phases),
                "p99 of a single call, us": median(_microseconds(one, "every_call", "p99_s") for one in phases),
                "longest single call, us": max(_microseconds(one, "every_call", "max_s") for one in phases),
                "waiting step, us": median(_microseconds(one, "idle_scheduling", "median_s") for one in phases),
                "waiting steps": median(one["steps"] - one["working_steps"] for one in phases),
                "all scheduling, ms per request": median(total),
                "all scheduling without offloading, ms per request": median(before),
            },
        )

    def read(self, phase: str, stack: StackName) -> Row:
        """Bytes that system calls read in the phase, beside bytes that the engine loaded and used."""
        phases = self._phases(phase, stack)
        read = [one["bytes_read"] / MIB for one in phases]
        used = [self._used_mib(one) for one in phases]
        return Row(
            f"read from below, {phase}: {stack.value}",
            "MiB",
            median(read),
            "bytes that the engine loaded",
            median(used),
            [a / b for a, b in zip(read, used, strict=True) if b],
        )

    def lookups(self, phase: str, stack: StackName) -> Row:
        """Chunk lookups per request, of the one round in which they are counted."""
        phases = self._phases(phase, stack)
        asked = phases[0]["asked"]
        return Row(
            f"lookups, {phase}: {stack.value}",
            "per request",
            _counted(phases[0], "lookups") / asked,
            "whole chunks of a prompt",
            cacheable_tokens(phases[0]) / BLOCK_TOKENS / asked,
            extra={
                "questions per request": median(_counted(one, "questions") for one in phases) / asked,
                "of them answered: ask again": median(_counted(one, "deferrals") for one in phases) / asked,
            },
        )

    def long(self, name: str, chunks: int, stack: StackName) -> Row:
        """Rows of a prefix that is longer than the CPU tier."""
        phases, cold = (
            [one[stack, Life.LONG][f"{name}, {when}"] for one in self._rounds if (stack, Life.LONG) in one]
            for when in ("again", "cold")
        )
        first = phases[0]
        used = self._used_mib(first)
        return Row(
            f"{chunks} chunks over a CPU tier of {self._sizes.long_host_chunks}: {stack.value}",
            "steps to the answer",
            first["steps_to_answer"],
            "steps when computed",
            cold[0]["steps_to_answer"],
            extra={
                "finished, 1 or 0": float(len(first["requests"])),
                "seconds": first["wall_s"],
                "seconds when computed": cold[0]["wall_s"],
                "of the prefix cached, %": 100 * cached_tokens(first) / (chunks * BLOCK_TOKENS),
                "MiB read": first["bytes_read"] / MIB,
                "MiB that the engine loaded": used,
                "lookups": float(_counted(first, "lookups")),
            },
        )

    def _phases(self, phase: str, stack: StackName) -> list[Phase]:
        return [one[stack, _LIVES[phase]][phase] for one in self._rounds]

    def _baselines(self, phase: str) -> list[Phase]:
        return [one[StackName.NONE, Life.FIRST][_BASELINES[phase]] for one in self._rounds]

    def _used_mib(self, phase: Phase) -> float:
        return _counted(phase, "tokens_loaded") * self._sizes.model.token_bytes / MIB


def first_token_ms(phase: Phase, of: Callable[[list[float]], float] = median) -> float:
    """Milliseconds from the arrival of a phase's requests to their first tokens, by default the median."""
    return 1e3 * of([float(one["ttft_s"]) for one in phase["requests"]])


def _microseconds(phase: Phase, what: str, which: str) -> float:
    return 1e6 * float(phase[what][which])


def _scheduling_ms(phase: Phase) -> float:
    return 1e3 * float(phase["scheduling"]["total_s"] + phase["idle_scheduling"]["total_s"])


def _counted(phase: Phase, what: str) -> int:
    return int(phase["counts"].get(what, 0))


def cached_tokens(phase: Phase) -> int:
    """Tokens of a phase's prompts that were not computed."""
    return sum(one["cached_tokens"] for one in phase["requests"])


def cacheable_tokens(phase: Phase) -> int:
    """Tokens in whole chunks of a phase's prompts."""
    return sum(one["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS for one in phase["requests"])


def _same_answers(phase: Phase, baseline: Phase) -> float:
    """Percent of requests whose tokens are those of the other phase's request of that name."""
    expected = {one["name"].partition(": ")[2]: one["tokens"] for one in baseline["requests"]}
    same = [bool(one["tokens"] == expected[one["name"].partition(": ")[2]]) for one in phase["requests"]]
    return 100 * sum(same) / len(same)
