"""Open lookup of one request of an engine that asks chunk by chunk: its questions, answers and held chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tierkv.manager.contract import RequestContext
from tierkv.manager.passages.passage import Passage
from tierkv.scheduler.staged.runs import Run
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

RETURNS_MAX = 8
"""Times that a lookup may gather chunks again which it had given up. Then it is answered from what is readable."""


class StagedRequest:
    """Open lookup of one request.

    Attributes:
        last_step: latest step with a question about it.
        last_asked_s: time of that step.
        deferred_since_s: time since when its lookup is deferred; None: not deferred.
        late_s: time at which it was given up as late; None: not late. It is repeated afresh once a tier answers.
        tier_s: seconds of the deferral in which a tier was asked or read.
        asked_tier_s: time since when a tier is being asked; None: none is.
        has_hit: whether it holds all that was gathered last, of each group at least one chunk.
        pins: single chunks held for it.
        num_groups: groups of the chunks that were gathered last.
        passage: holds further chunks for it.
        held: readable chunks of both.
        reserved: chunks that the passage was last asked for.
        allows_all: whether every readable chunk is a HIT in this step.
        slow: tiers that were too slow for its latest questions; None: it had none.
        waits: whether the questions of this step are answered by the first of them alone.
        answers: answers of this step, except for ``held`` chunks.
        runs: by group.
    """

    __slots__ = (
        "_given_up", "_places", "_returns", "allows_all", "answers", "asked_tier_s", "ctx", "deferred_since_s",
        "has_hit", "held", "last_asked_s", "last_step", "late_s", "load_tokens_max", "num_groups", "passage", "pins",
        "reserved", "runs", "slow", "tier_s", "waits",
    )  # fmt: skip

    def __init__(self, ctx: RequestContext) -> None:
        self.ctx = ctx
        self.load_tokens_max = ctx.hints.max_load_tokens
        self.last_step = -1
        self.last_asked_s = 0.0
        self.deferred_since_s: float | None = None
        self.late_s: float | None = None
        self.asked_tier_s: float | None = None
        self.tier_s = 0.0
        self.pins: set[Key] = set()
        self.passage: Passage | None = None
        self.held: set[Key] = set()
        self.reserved: tuple[Key, ...] = ()
        self.has_hit = False
        self.num_groups = 0
        self.allows_all = False
        self.slow: frozenset[int] | None = None
        self.waits = False
        self.answers: dict[Key, LookupResult] = {}
        self.runs: dict[int, Run] = {}
        self._places: dict[Key, tuple[int, int]] = {}  # group and end of the chunks that were gathered last
        self._given_up: set[Key] = set()  # chunks that were gathered earlier
        self._returns = 0  # number of times that some of them were gathered again

    def wanted(self, chunk_tokens: Sequence[int]) -> tuple[Key, ...]:
        """Chunks that the request wants at the end of a step, in prefix order.

        No hit reaches further than the last wanted chunk of each group, and there is none if a group has no chunk.
        Chunks of other groups beyond that end are not wanted.
        """
        return _in_order(self._wanted_places(self._end_max(), chunk_tokens))

    def to_gather(self, chunk_tokens: Sequence[int], budgets: Sequence[int]) -> tuple[Key, ...]:
        """The wanted chunks, and those held of the last gathering in front of the same end, as the budgets allow.

        An engine asks about the states of a shorter hit only after a MISS behind it. If it is
        deferred before that, because a chunk of the longer one finds no slot, it asks about other states. Without the
        held ones, it would lose in each step what it gathered in the step before, and wait for ever.
        """
        end_max = self._end_max()
        places = self._wanted_places(end_max, chunk_tokens)
        counts = Counter(group for group, _ in places.values())
        held = () if self.passage is None else self.passage.granted()
        for key, (group, end) in self._places.items():
            is_in_front = key in held and key not in places and end - chunk_tokens[group] < end_max
            if is_in_front and counts[group] < budgets[group]:
                counts[group] += 1
                places[key] = group, end
        self._returns += not self._given_up.isdisjoint(places)
        self._given_up |= self._places.keys() - places.keys()
        self._places, self.num_groups = places, len(counts)
        return _in_order(places)

    @property
    def alternates(self) -> bool:
        """Whether it has wanted chunks again and again that it had given up for others, so that it may never end."""
        return self._returns >= RETURNS_MAX

    def holds_all_groups(self, num_groups: int) -> bool:
        """Whether all chunks that were gathered last are held and readable, and each group has one."""
        return bool(self.reserved) and self.num_groups == num_groups and self.held.issuperset(self.reserved)

    def _end_max(self) -> int:
        return min((max(run.wanted.values(), default=0) for run in self.runs.values()), default=0)

    def _wanted_places(self, end_max: int, chunk_tokens: Sequence[int]) -> dict[Key, tuple[int, int]]:
        """Group and end of each wanted chunk."""
        return {
            key: (group, end)
            for group, run in self.runs.items()
            for key, end in run.wanted.items()
            if end - chunk_tokens[group] < end_max
        }

    @property
    def awaits_tier(self) -> bool:
        """Whether a tier must answer before the wanted chunks of some group are known."""
        return any(run.awaits_tier for run in self.runs.values())

    def is_deferred(self) -> bool:
        """Whether the engine waits. It does not wait for chunks of one group if another group has none."""
        if self.awaits_tier or not all(run.wanted for run in self.runs.values()):
            return self.awaits_tier
        return bool(self.open_answers(key for run in self.runs.values() for key in run.wanted))

    def open_answers(self, keys: Iterable[Key]) -> set[LookupResult]:
        """Answers other than HIT that were given for these chunks in this step."""
        return {self.answers[key] for key in keys} - {LookupResult.HIT}

    def still_waits(self, first: Key) -> bool:
        """Whether wanted chunks are being read, so that a question from ``first`` on is deferred.

        Chunks of other requests can be ready by now, and chunks can be gone: the question after the passage sees that.
        """
        passage = self.passage
        return bool(
            self.reserved
            and first == self.reserved[0]
            and not self.pins
            and self.late_s is None
            and passage is not None
            and passage.keys == self.reserved
            and passage.outstanding
            and not passage.failed
        )

    def forget(self) -> None:
        """Forget the lookup, whose chunks were released."""
        self.last_step = -1
        self.pins = set()
        self.held = set()
        self.passage = None
        self.reserved = ()
        self._places = {}
        self._given_up = set()
        self._returns = 0
        self.waits = False
        self.runs.clear()
        self.answers.clear()
        self.deferred_since_s = self.late_s = self.asked_tier_s = None


def _in_order(places: Mapping[Key, tuple[int, int]]) -> tuple[Key, ...]:
    return tuple(sorted(places, key=lambda key: places[key][1]))
