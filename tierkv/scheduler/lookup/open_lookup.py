"""State of the lookup of one request: its question, its search and its result."""

from __future__ import annotations

from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult


class OpenLookup:
    """The lookup of a request, open or not. :class:`~tierkv.scheduler.lookup.lookups.Lookups` keeps it up to date.

    Attributes:
        question: computed tokens, end and numbers of keys that the lookup is about; None: not open.
        since_s: time of the first question, on the stack's clock; None: no question.
        last_asked_s: time of the latest question.
        previous_asked_s: time of the question before it.
        load_moved_s: latest progress of the load of another request that it waits for; None: it waits for none.
        load_waited_s: seconds for which that load has made no progress.
        has_lost: whether a chunk that it had found was lost since.
        late_s: time at which it was given up as late; None: not late. It is repeated afresh once a tier answers.
        known: answers of shared tiers to this lookup, by chunk; RETRY while there is none yet.
        seen: by allowed tiers, answers of a search that stopped at the budget of its step, for the search that
            continues it.
        ends: by the largest end of such a search and its allowed tiers, the largest end that its hit may have.
        reached: by first chunk of a group's search and by allowed tiers, number of chunks found in a row from there on.
        found_below: whether a chunk of the hit would have to be read.
        choice_version: version of what was known of the speeds when loading or computing was chosen.
        began: step in which the search began whose findings are kept; None: nothing is kept.
        verifies: whether that search repeats one that waited for a tier.
        paused: the latest search stopped at the budget of its step.
        continued: it continued one of an earlier step, so tiers may have answered since what it relies on.
        searched_version: version of the manager's knowledge at the latest search.
        shortened_question: latest question whose hit was shortened, so that it is counted once.
        hit_tokens: tokens of the hit beyond the computed ones.
        wanted: chunks of the hit.
        gathered: the wanted chunks that are gathered before the answer.
        asked_tier_s: time since when a tier is being asked; None: none is.
        probing_s: seconds in which any tier had been asked by then.
        tier_s: seconds spent waiting for tiers that no account has counted yet.
        turn: the latest turn in which it was searched.
    """

    __slots__ = (
        "asked_tier_s", "began", "choice_version", "continued", "ends", "found_below", "gathered", "has_lost",
        "hit_tokens", "known", "last_asked_s", "late_s", "load_moved_s", "load_waited_s", "paused",
        "previous_asked_s", "probing_s", "question", "reached", "searched_version", "seen", "shortened_question",
        "since_s", "tier_s", "turn", "verifies", "wanted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.question: tuple[int, ...] | None = None
        self.since_s: float | None = None
        self.has_lost = False
        self.last_asked_s = self.previous_asked_s = 0.0
        self.load_moved_s: float | None = None
        self.load_waited_s = 0.0
        self.late_s: float | None = None
        self.known: dict[Key, LookupResult] = {}
        self.reached: dict[tuple[Key, frozenset[str] | None], int] = {}
        self.seen: dict[frozenset[str] | None, dict[Key, LookupResult]] = {}
        self.ends: dict[tuple[int, frozenset[str] | None], int] = {}
        self.found_below = False
        self.began: int | None = None
        self.verifies = False
        self.paused = self.continued = False
        self.searched_version = self.choice_version = -1
        self.shortened_question: tuple[int, ...] | None = None
        self.hit_tokens = 0
        self.wanted: tuple[Key, ...] = ()
        self.gathered: tuple[Key, ...] = ()
        self.asked_tier_s: float | None = None
        self.probing_s = 0.0
        self.tier_s = 0.0
        self.turn = -1

    @property
    def will_stream(self) -> bool:
        """Whether the hit is longer than the gathered part."""
        return len(self.gathered) < len(self.wanted)

    def close(self) -> None:
        """Forget question and result."""
        self.since_s = None
        self.has_lost = False
        self.question = None
        self.paused = False
        self.forget_found()
        self.hit_tokens = 0
        self.wanted = self.gathered = ()

    def forget_found(self) -> None:
        """Search from the start again: the question has changed, or a chunk was or may be lost."""
        self.known = {}
        self.reached = {}
        self.seen = {}
        self.ends = {}
        self.found_below = False
        self.began = None
        self.verifies = False

    def begin_search(self, step: int) -> None:
        """Begin a search, or continue one with what it has found."""
        self.continued, self.paused = any(self.seen.values()), False
        if self.began is None:
            self.began = step

    def search_anew(self, now_s: float) -> None:
        """Search from the start: a chunk that was found is gone.

        After the first one, only later answers of shared tiers count. After further ones these still do: a prompt with
        many damaged chunks would otherwise be asked about from its first chunk on, once for each of them.
        """
        self.forget_found()
        if not self.has_lost:
            self.since_s, self.has_lost = now_s, True

    def verify(self) -> None:
        """Search again, once: chunks of a stream that are not held may have been lost since they were found."""
        self.forget_found()
        self.verifies = True

    def is_load_late(self, moved_s: float | None, now_s: float, deadline_s: float) -> bool:
        """Whether the load of another request that the lookup waits for has made no progress for the deadline.

        Only the engine reports progress. So the time between two questions counts for a quarter of the deadline at
        most: a silent engine makes no load late.

        moved_s: time of that load's latest progress; None: there is no such load.
        """
        if moved_s is None or moved_s != self.load_moved_s:
            self.load_moved_s, self.load_waited_s = moved_s, 0.0
            return False
        self.load_waited_s += min(now_s - self.previous_asked_s, deadline_s / 4)
        return self.load_waited_s >= deadline_s

    def is_settled(self, version: int) -> bool:
        """Whether another search would find nothing new: it has seen all that the manager knows, at that version."""
        return self.searched_version == version and not self.continued

    def is_outdated(self, step: int) -> bool:
        """Whether the hit would stream, was found in part before this step, and was not verified."""
        return self.will_stream and not self.verifies and self.began is not None and self.began < step
