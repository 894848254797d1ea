"""State of the lookup of one request: its question, its search and its result."""

from __future__ import annotations

from tierkv.types.keys import Key


class OpenLookup:
    """The lookup of a request, open or not. :class:`~tierkv.scheduler.lookup.lookups.Lookups` keeps it up to date.

    Attributes:
        question: computed tokens, end and numbers of keys that the lookup is about; None: not open.
        first_asked_s: time of the first question, from which the deadline counts; None: no question.
        last_asked_s: time of the latest question.
        may_stream: whether the hit may be longer than what can be gathered at once.
        searched_version: version of the manager's knowledge at the latest search.
        shortened_question: latest question whose hit was shortened, so that it is counted once.
        hit_tokens: tokens of the hit beyond the computed ones.
        wanted: chunks of the hit.
        gathered: the wanted chunks that are gathered before the answer.
    """

    __slots__ = (
        "first_asked_s", "gathered", "hit_tokens", "last_asked_s", "may_stream", "question", "searched_version",
        "shortened_question", "wanted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.question: tuple[int, ...] | None = None
        self.first_asked_s: float | None = None
        self.last_asked_s = 0.0
        self.may_stream = False
        self.searched_version = -1
        self.shortened_question: tuple[int, ...] | None = None
        self.hit_tokens = 0
        self.wanted: tuple[Key, ...] = ()
        self.gathered: tuple[Key, ...] = ()

    @property
    def will_stream(self) -> bool:
        """Whether the hit is longer than the gathered part."""
        return len(self.gathered) < len(self.wanted)

    def close(self) -> None:
        """Forget question and result."""
        self.first_asked_s = None
        self.question = None
        self.hit_tokens = 0
        self.wanted = self.gathered = ()
