"""Classes of chunks that behave alike, by number of requests, new chunks of the last request, and its hints."""

from __future__ import annotations

from bisect import bisect_right

from tierkv.types.hints import PRIORITY_MAX, RequestHints

SEEN_FROM = (1, 2, 3, 4, 6, 12, 30)
"""Lower bounds of the kinds by number of requests that had the chunk in their path."""
NEW_FROM = (0, 3, 9, 33)
"""Lower bounds of the kinds by number of chunks that the last such request was the first to have."""
SEEN_MAX = 255

_KINDS = len(NEW_FROM)
_FOLLOWS = len(SEEN_FROM) * _KINDS
"""First class of chunks seen once, whose request continued chunks that few requests had: mostly a session."""
_TAILS = _FOLLOWS + _KINDS
"""First class of the last chunks of paths, seen once: a session may continue with other text in their place."""
ABANDONED = _TAILS + _KINDS
"""Class of abandoned tails: a later request continued from the middle of their path."""

CONTINUES_FROM = (0.0, 0.1, 0.35, 0.65, 0.9)
"""Lower bounds of the kinds by hinted probability that a session continues."""
HINTED_SEEN_FROM = (1, 2, 6)
HINTED = ABANDONED + 1
_HINTED_TAILS = HINTED + len(CONTINUES_FROM) * len(HINTED_SEEN_FROM)
ONE_SHOT = _HINTED_TAILS + len(CONTINUES_FROM)
CLASSES = ONE_SHOT + 1

PUBLIC_SEEN_MIN = 12
"""Number of requests from which on a chunk is public: hints about one session do not affect it."""

_PUBLIC = SEEN_FROM.index(PUBLIC_SEEN_MIN) * _KINDS

LEVELS = 6
"""Number of priority levels. Each level has four times the value of the level below it."""
LEVEL_NORMAL = 2
LEVEL_WEIGHT = tuple(4.0 ** (level - LEVEL_NORMAL) for level in range(LEVELS))

_SEEN_BASE = bytes(_KINDS * (max(1, bisect_right(SEEN_FROM, seen)) - 1) for seen in range(SEEN_MAX + 1))
_HINTED_BASE = bytes(
    HINTED + len(CONTINUES_FROM) * (max(1, bisect_right(HINTED_SEEN_FROM, seen)) - 1) for seen in range(SEEN_MAX + 1)
)


def is_private(number: int) -> bool:
    """Whether chunks of a class belong mostly to one session.

    Only these show how reuse depends on age. Chunks of the other classes are too different, or are not reused.
    """
    return number < _PUBLIC or _FOLLOWS <= number < ABANDONED


def classes_for(new: int, hints: RequestHints, *, follows: bool = False) -> bytes:
    """Classes of a request's chunks, indexed by the number of requests that had the chunk, this one included.

    Args:
        new: number of chunks that the request is the first to have.
        hints: hints of the request.
        follows: whether few requests had the deepest chunk that was seen before.
    """
    kind = bisect_right(NEW_FROM, new) - 1
    if hints.one_shot:
        return _ONE_SHOT[kind]
    continues = 0.0 if hints.closed else hints.continues
    if continues is None:
        return _FOLLOWING[kind] if follows else _PLAIN[kind]
    return _HINTED[kind][_continuing(continues)]


def tail_class(number: int) -> int:
    """Class of the last chunk of a path, seen for the first time; ``number`` is the class of the chunks before it."""
    if number < _TAILS:
        return _TAILS + number % _KINDS
    return _HINTED_TAILS + (number - HINTED) % len(CONTINUES_FROM) if HINTED <= number < ONE_SHOT else number


def _continuing(continues: float) -> int:
    return bisect_right(CONTINUES_FROM, continues) - 1


def level_of(hints: RequestHints) -> int:
    """Priority level that a request gives its chunks."""
    half = PRIORITY_MAX // 2
    level = LEVEL_NORMAL + (hints.priority > 0) + (hints.priority > half)
    level -= (hints.priority < 0) + (hints.priority < -half)
    return level + hints.retain


def hinted_probability(number: int) -> float | None:
    """Probability of continuation in the middle of a hinted class; None for other classes."""
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
