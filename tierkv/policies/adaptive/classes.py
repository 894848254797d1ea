"""Which chunks are alike: classes by how often a chunk was seen and what its last request brought, or said."""

from __future__ import annotations

from bisect import bisect_right

from tierkv.types.hints import PRIORITY_MAX, RequestHints

SEEN_FROM = (1, 2, 3, 4, 6, 12, 30)
"""Requests that had the chunk in their path: where each kind begins."""
NEW_FROM = (0, 3, 9, 33)
"""Chunks of the last such request that nobody had seen before: where each kind begins."""
SEEN_MAX = 255

_KINDS = len(NEW_FROM)
_FOLLOWS = len(SEEN_FROM) * _KINDS
"""From here on, classes of chunks seen once whose request went on from what few others had: a session, mostly."""
_TAILS = _FOLLOWS + _KINDS
"""From here on, classes of the last chunks of paths, seen once: a session may go on with other text in its place."""
ABANDONED = _TAILS + _KINDS
"""The class of tails that a later request left behind: it went on from the middle of what they belong to."""

CONTINUES_FROM = (0.0, 0.1, 0.35, 0.65, 0.9)
"""Hinted probabilities that a session goes on: where each kind begins."""
HINTED_SEEN_FROM = (1, 2, 6)
HINTED = ABANDONED + 1
_HINTED_TAILS = HINTED + len(CONTINUES_FROM) * len(HINTED_SEEN_FROM)
ONE_SHOT = _HINTED_TAILS + len(CONTINUES_FROM)
CLASSES = ONE_SHOT + 1

PUBLIC_SEEN_MIN = 12
"""A chunk that so many requests had in their path does not depend on what one of them says of its session."""

_PUBLIC = SEEN_FROM.index(PUBLIC_SEEN_MIN) * _KINDS

LEVELS = 6
"""Kinds of priority. Each is worth four times the one below it."""
LEVEL_NORMAL = 2
LEVEL_WORTH = tuple(4.0 ** (level - LEVEL_NORMAL) for level in range(LEVELS))

_SEEN_BASE = bytes(_KINDS * (max(1, bisect_right(SEEN_FROM, seen)) - 1) for seen in range(SEEN_MAX + 1))
_HINTED_BASE = bytes(
    HINTED + len(CONTINUES_FROM) * (max(1, bisect_right(HINTED_SEEN_FROM, seen)) - 1) for seen in range(SEEN_MAX + 1)
)


def is_private(number: int) -> bool:
    """Whether chunks of a class belong to one session, mostly: they say how re-use depends on age.

    The others are not alike enough, or do not come back.
    """
    return number < _PUBLIC or _FOLLOWS <= number < ABANDONED


def classes_for(new: int, hints: RequestHints, *, follows: bool = False) -> bytes:
    """The class of a chunk of a request, by how often the chunk was seen, this time included.

    new: chunks that the request brought and nobody had seen before.
    follows: whether the deepest chunk that somebody had seen before was seen by few.
    """
    kind = bisect_right(NEW_FROM, new) - 1
    if hints.one_shot:
        return _ONE_SHOT[kind]
    continues = 0.0 if hints.closed else hints.continues
    if continues is None:
        return _FOLLOWING[kind] if follows else _PLAIN[kind]
    return _HINTED[kind][_continuing(continues)]


def tail_class(number: int) -> int:
    """The class of a path's last chunk that is seen for the first time. number: of one like it that is not the last."""
    if number < _TAILS:
        return _TAILS + number % _KINDS
    return _HINTED_TAILS + (number - HINTED) % len(CONTINUES_FROM) if HINTED <= number < ONE_SHOT else number


def _continuing(continues: float) -> int:
    return bisect_right(CONTINUES_FROM, continues) - 1


def level_of(hints: RequestHints) -> int:
    """The kind of priority that a request gives its chunks."""
    half = PRIORITY_MAX // 2
    level = LEVEL_NORMAL + (hints.priority > 0) + (hints.priority > half)
    level -= (hints.priority < 0) + (hints.priority < -half)
    return level + hints.retain


def hinted_probability(number: int) -> float | None:
    """The probability that a hint of this class speaks of, in the middle; None: no class of hints."""
    if not HINTED <= number < ONE_SHOT:
        return None
    return (0.04, 0.22, 0.5, 0.78, 0.95)[(number - HINTED) % len(CONTINUES_FROM)]


_PLAIN = tuple(bytes(base + kind for base in _SEEN_BASE) for kind in range(_KINDS))
_FOLLOWING = tuple(bytes((_FOLLOWS + kind,)) * 2 + _PLAIN[kind][2:] for kind in range(_KINDS))
_ONE_SHOT = tuple(bytes((ONE_SHOT,)) * 2 + _PLAIN[kind][2:] for kind in range(_KINDS))
_HINTED = tuple(
    tuple(
        bytes(base + continuing for base in _HINTED_BASE[:PUBLIC_SEEN_MIN]) + _PLAIN[kind][PUBLIC_SEEN_MIN:]
        for continuing in range(len(CONTINUES_FROM))
    )
    for kind in range(_KINDS)
)
