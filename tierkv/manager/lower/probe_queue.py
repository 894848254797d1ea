"""Queue of the chunks that a shared tier is asked for, and the size of its probes. Sans-IO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from tierkv.manager.lower.read_speed import TierSpeed
from tierkv.types.keys import Key

WAITING_KEYS_MAX = 65_536
"""Keys that wait to be asked for. Over it a later step asks again."""

FIRST_KEYS = 32
"""Keys per probe of a tier whose speed is not known yet."""


class ProbeQueue:
    """Keys in the order in which requests asked for them; each waits here until it is part of a probe.

    The keys that wait are divided among as many probes as the backend takes at once. A probe has no more keys than the
    tier is expected to answer within ``seconds``. So its deadline concerns few keys, and none that wait.

    Requests do not wait for a tier that :attr:`is_slow`, but for a few keys at times, which measure it again.

    Args:
        concurrency: probes in flight at once.
        keys_min: keys per probe, where more wait.
        keys_max: largest number of keys per probe.
        seconds: time that one probe should take.
    """

    __slots__ = (
        "_asked", "_concurrency", "_for_writes", "_in_flight", "_in_proportion", "_keys_max", "_keys_min", "_sampled",
        "_seconds", "_waiting", "is_slow", "speed",
    )  # fmt: skip

    def __init__(self, concurrency: int, keys_min: int, keys_max: int, seconds: float) -> None:
        self._concurrency = concurrency
        self._keys_min = keys_min
        self._keys_max = keys_max
        self._seconds = seconds
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._asked: set[Key] = set()
        self._for_writes: dict[Key, None] = {}  # those of both whose chunks are written if they are not there
        self._in_flight = 0
        self._in_proportion = FIRST_KEYS  # keys that the previous probe would have had, had it taken ``seconds``
        self._sampled = 0  # keys of the latest sample of a slow tier
        self.speed = TierSpeed()
        """Speed of one probe, in keys in place of bytes."""
        self.is_slow = False
        """Whether the questions about a long prompt, or its reads, take longer than computing it."""

    def __len__(self) -> int:
        """Number of keys that wait or are part of a probe."""
        return len(self._waiting) + len(self._asked)

    def __bool__(self) -> bool:
        """Whether a key waits or is part of a probe."""
        return bool(self._waiting or self._asked)

    @property
    def s_per_key(self) -> float | None:
        """Seconds per key of a question that takes many probes; None until known."""
        expected, keys = self.speed.expected(0), self._keys_per_probe
        return expected and (expected.latency_s + keys * expected.s_per_byte) / (keys * self._concurrency)

    def ask(self, key: Key, now: float) -> bool:
        """Ask for a key on behalf of a request. Returns whether the request should wait for the answer."""
        if self.is_slow and not (key in self._asked or self._samples(now)):
            return False
        self._put(key)
        return True

    def _samples(self, now: float) -> bool:
        """Whether one more key may be asked for to measure a slow tier again: as many as it answers in ``seconds``."""
        if self.speed.is_stale(now):
            self.speed.sampled(now)
            self._sampled = 0
        is_sampling = now == self.speed.sampled_s
        self._sampled += is_sampling
        return is_sampling and self._sampled <= self._concurrency * self._keys_per_probe

    def put(self, key: Key) -> None:
        """Ask for a key, whose chunk is to be written if the tier does not have it."""
        self._put(key)
        if key in self._waiting or key in self._asked:
            self._for_writes[key] = None

    def _put(self, key: Key) -> None:
        """Ask for a key, unless it waits or is part of a probe already."""
        if key not in self._asked and len(self._waiting) < WAITING_KEYS_MAX:
            self._waiting.setdefault(key)

    def clear(self) -> None:
        """Discard the keys that wait, because the tier is out of service."""
        self._waiting.clear()
        self._for_writes = dict.fromkeys(key for key in self._for_writes if key in self._asked)

    def measure_anew(self) -> None:
        """Forget the speed: the tier has returned to service, and what it took to answer before says nothing now."""
        self.speed, self._in_proportion = TierSpeed(), FIRST_KEYS

    def became_slow(self) -> None:
        """Let requests wait for no key any more. What is to be written is still asked for."""
        self.is_slow = True
        self._waiting = OrderedDict.fromkeys(key for key in self._for_writes if key in self._waiting)

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
        latency_s, s_per_key, keys = self.speed.latency_s, self.speed.s_per_byte, self._in_proportion
        if latency_s is not None and s_per_key is not None:
            keys = min(keys, int((self._seconds - latency_s) / s_per_key))
        return min(max(keys, self._keys_min), self._keys_max)

    def ended(self, keys: Iterable[Key], again: Sequence[Key], asked: int, elapsed_s: float) -> None:
        """End a probe, by its answers or by its deadline.

        Args:
            keys: its keys.
            again: those to ask for again. They wait first of all.
            asked: number of keys that the backend was asked for.
            elapsed_s: seconds that the call took: the reads ahead of it in a queue say nothing about questions.
        """
        self._in_flight -= 1
        self._asked.difference_update(keys)
        refused = set(again)
        for key in keys:
            if key not in refused:
                self._for_writes.pop(key, None)
        for key in reversed(again):
            self._waiting[key] = None
            self._waiting.move_to_end(key, last=False)
        if asked and elapsed_s > 0:
            self.speed.measured(asked, elapsed_s)
            self._in_proportion = int(self._seconds * asked / elapsed_s)
