"""What is known about objects without asking: names that were listed at open, and names that were absent a moment ago.

Both are hints that other writers may make wrong at any time. A listed name that is gone costs a read that misses; an
absence that is over costs an upload that the server refuses. Nothing here says that a chunk is *not* there: another
engine may have stored it a moment ago, and sharing is what the tier is for.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

LISTED_S = 300.0
"""How long a listed name is believed, in seconds after the listing began."""
ABSENT_S = 60.0
"""How long an absence is remembered, in seconds. Between a lookup that missed and the store lies a prefill."""
ABSENT_NAMES_MAX = 65536

Clock = Callable[[], float]


class Listing:
    """Names that were there at open. Each answers one question and is then forgotten: after that, ask. Any thread.

    A name takes about 110 bytes until then.

    Args:
        names_max: no more are kept.
        time_s: a listing that takes longer ends early.
    """

    def __init__(self, names_max: int, time_s: float, clock: Clock = time.monotonic) -> None:
        self._names_max = names_max
        self._time_s = time_s
        self._clock = clock
        self._began_s = clock()
        self._lock = threading.Lock()
        self._names: set[bytes] = set()
        self._known: set[bytes] | None = set()  # while pages come in: what they say of these may be old
        self._stopped = False

    def __len__(self) -> int:
        """Names that have not been asked for yet."""
        return len(self._names)

    def fill(self, pages: Iterable[Sequence[str]]) -> None:
        """Take in pages of object names, until one of the bounds or :meth:`stop`. May raise what the pages raise."""
        try:
            for page in pages:
                digests = {digest for name in page if (digest := _digest(name)) is not None}
                with self._lock:
                    room = self._names_max - len(self._names)
                    self._names.update(sorted(digests - (self._known or set()))[:room])
                    is_full = len(self._names) >= self._names_max
                if self._stopped or is_full or self._clock() - self._began_s > self._time_s:
                    return
        finally:
            with self._lock:
                self._known = None

    def take(self, name: str) -> bool:
        """Whether the name was listed, the first time that it is asked for."""
        if not self._names:
            return False
        with self._lock:
            if self._clock() - self._began_s > LISTED_S:
                self._names.clear()
                return False
            digest = _digest(name)
            if digest in self._names:
                self._names.discard(digest)
                return True
        return False

    def forget(self, name: str) -> None:
        """This process has just stored or removed the object, or missed it: what was listed does not count."""
        digest = _digest(name)
        if digest is None:
            return
        with self._lock:
            self._names.discard(digest)
            if self._known is not None:
                self._known.add(digest)

    def stop(self) -> None:
        """Take in no further page."""
        self._stopped = True


class Absences:
    """Names that the store has just said it does not hold. Bounded; any thread."""

    def __init__(self, clock: Clock = time.monotonic, names_max: int = ABSENT_NAMES_MAX) -> None:
        self._clock = clock
        self._names_max = names_max
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str) -> None:
        """The store said so now."""
        with self._lock:
            self._until[name] = self._clock() + ABSENT_S
            self._until.move_to_end(name)
            if len(self._until) > self._names_max:
                self._until.popitem(last=False)

    def take(self, name: str) -> bool:
        """Whether the name was absent lately; it is forgotten, for it is about to be stored."""
        with self._lock:
            until = self._until.pop(name, None)
        return until is not None and self._clock() < until


def _digest(name: str) -> bytes | None:
    """The bytes that an object's name spells, or None where it is no name of ours."""
    last = name.rpartition("/")[2]
    try:
        return bytes.fromhex(last) if len(last) == 32 else None  # noqa: PLR2004  two hex digits for each of 16 bytes
    except ValueError:
        return None
