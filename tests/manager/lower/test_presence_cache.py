"""Cache of the answers of one tier."""

from __future__ import annotations

from tierkv.manager.lower.presence_cache import EXPIRED_KEPT_S, PresenceCache
from tierkv.types.keys import Key

KEYS = [Key(bytes([i]) * 20) for i in range(9)]


def test_the_answers_of_a_step_are_all_kept_until_the_next_one() -> None:
    """A lookup sees each answer once, however few are kept. Otherwise it would ask for the same chunks for ever."""
    cache = PresenceCache(2)
    for key in KEYS:
        cache.put(key, 10.0, present=True, answered=0.0)
    assert [cache.get(key, 0.0) for key in KEYS] == [True] * 9
    cache.expire(0.1)
    assert [cache.get(key, 0.1) for key in KEYS] == [None] * 7 + [True] * 2


def test_an_expired_answer_counts_for_older_lookups_for_a_while() -> None:
    """A lookup that is open when a tier answers must find that answer, also after its time to live."""
    cache = PresenceCache(9)
    cache.put(KEYS[0], 1.0, present=True, answered=0.5)
    assert cache.get(KEYS[0], 2.0) is None
    assert cache.get(KEYS[0], 2.0, since=0.0) is True
    cache.expire(EXPIRED_KEPT_S)
    assert cache.get(KEYS[0], EXPIRED_KEPT_S, since=0.0) is True
    cache.expire(EXPIRED_KEPT_S + 0.5)
    assert len(cache) == 0
    assert not cache.any
