"""Queue of the chunks that a shared tier is asked for, and the size of its probes. Sans-IO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from tierkv.types.keys import Key

WAITING_KEYS_MAX = 65_536
"""Keys that wait to be asked for. Over it a later step asks again."""

FIRST_KEYS = 32
"""Keys per probe of a tier whose speed is not known yet."""

WEIGHT = 1 / 4
"""Weight of one probe in the measured time per key."""


class ProbeQueue:
    """Keys in the order in which requests asked for them; each waits here until it is part of a probe.

    The keys that wait are divided among as many probes as the backend takes at once. A probe has no more keys than the
    tier is expected to answer within ``seconds``. So its deadline concerns few keys, and none that wait.

    Args:
        concurrency: probes in flight at once.
        keys_min: keys per probe, where more wait.
        keys_max: largest number of keys per probe.
        seconds: time that one probe should take.
    """

    __slots__ = ("_asked", "_concurrency", "_in_flight", "_keys_max", "_keys_min", "_s_per_key", "_seconds", "_waiting")

    def __init__(self, concurrency: int, keys_min: int, keys_max: int, seconds: float) -> None:
        self._concurrency = concurrency
        self._keys_min = keys_min
        self._keys_max = keys_max
        self._seconds = seconds
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._asked: set[Key] = set()
        self._in_flight = 0
        self._s_per_key: float | None = None

    def __len__(self) -> int:
        """Number of keys that wait or are part of a probe."""
        return len(self._waiting) + len(self._asked)

    def __bool__(self) -> bool:
        """Whether a key waits or is part of a probe."""
        return bool(self._waiting or self._asked)

    def put(self, key: Key) -> None:
        """Ask for a key, unless it waits or is part of a probe already."""
        if key not in self._asked and len(self._waiting) < WAITING_KEYS_MAX:
            self._waiting.setdefault(key)

    def clear(self) -> None:
        """Discard the keys that wait, because the tier is out of service."""
        self._waiting.clear()

    def take(self, keys_max: int) -> list[tuple[Key, ...]]:
        """Take the keys of the probes to begin now, at most ``keys_max`` together."""
        probes: list[tuple[Key, ...]] = []
        while self._waiting and keys_max > 0 and self._in_flight < self._concurrency:
            share = -(-len(self._waiting) // (self._concurrency - self._in_flight))
            size = min(max(share, self._keys_min), self._keys_per_probe, keys_max)
            keys = tuple(islice(self._waiting, size))
            for key in keys:
                del self._waiting[key]
            self._asked.update(keys)
            self._in_flight += 1
            keys_max -= len(keys)
            probes.append(keys)
        return probes

    @property
    def _keys_per_probe(self) -> int:
        """Largest number of keys that the tier is expected to answer in time."""
        if self._s_per_key is None:
            return min(max(FIRST_KEYS, self._keys_min), self._keys_max)
        return min(max(int(self._seconds / self._s_per_key), self._keys_min), self._keys_max)

    def ended(self, keys: Iterable[Key], again: Sequence[Key], asked: int, elapsed_s: float) -> None:
        """End a probe, by its answers or by its deadline.

        Args:
            keys: its keys.
            again: those to ask for again. They wait first of all.
            asked: number of keys that the backend was asked for.
            elapsed_s: seconds since it began.
        """
        self._in_flight -= 1
        self._asked.difference_update(keys)
        for key in reversed(again):
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)
        if asked and elapsed_s > 0:
            s_per_key = elapsed_s / asked
            old = s_per_key if self._s_per_key is None else self._s_per_key
            self._s_per_key = old + WEIGHT * (s_per_key - old)
