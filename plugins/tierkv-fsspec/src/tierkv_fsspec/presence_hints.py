"""Knowledge about objects without a request: names listed at open, and names that were absent at a recent lookup.

Other writers may invalidate both at any time. A listed name that was deleted meanwhile costs a read that misses. An
absent name that was stored meanwhile costs an upload that the server refuses. Neither ever answers a lookup with
"absent": another engine may have stored the chunk a moment ago, and the tier exists to share it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

LISTED_S = 300.0
"""Lifetime of a listed name, in seconds after the listing began."""
ABSENT_S = 60.0
"""Lifetime of an absent name, in seconds. A prefill runs between the lookup that missed and the store."""
ABSENT_NAMES_MAX = 65536

Clock = Callable[[], float]


class ListedNames:
    """Names listed at open. Each answers one lookup and is then removed. May be used on any thread.

    A name takes about 110 bytes.

    Args:
        names_max: bound of the number of names.
        time_s: bound of the listing's duration in seconds.
        clock: monotonic seconds.
    """

    def __init__(self, names_max: int, time_s: float, clock: Clock = time.monotonic) -> None:
        self._names_max = names_max
        self._time_s = time_s
        self._clock = clock
        self._began_s = clock()
        self._lock = threading.Lock()
        self._names: set[bytes] = set()
        self._forgotten: set[bytes] | None = set()  # while pages arrive: for these names a page may be outdated
        self._stopped = False

    def __len__(self) -> int:
        """Number of names that have not been looked up yet."""
        return len(self._names)

    def add_pages(self, pages: Iterable[Sequence[str]]) -> None:
        """Add pages of object names until one of the bounds or :meth:`stop`. Raises whatever ``pages`` raises."""
        try:
            for page in pages:
                digests = {digest for name in page if (digest := _digest(name)) is not None}
                with self._lock:
                    room = self._names_max - len(self._names)
                    self._names.update(sorted(digests - (self._forgotten or set()))[:room])
                    is_full = len(self._names) >= self._names_max
                if self._stopped or is_full or self._clock() - self._began_s > self._time_s:
                    return
        finally:
            with self._lock:
                self._forgotten = None

    def take_listed(self, name: str) -> bool:
        """Whether the name was listed and has not been looked up yet; removes it."""
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

    def forget_name(self, name: str) -> None:
        """Remove a name that this process has stored, deleted or missed: the listing is outdated for it."""
        digest = _digest(name)
        if digest is None:
            return
        with self._lock:
            self._names.discard(digest)
            if self._forgotten is not None:
                self._forgotten.add(digest)

    def stop(self) -> None:
        """Add no further page."""
        self._stopped = True


class AbsentNames:
    """Names that were absent at a recent lookup. Bounded; may be used on any thread."""

    def __init__(self, clock: Clock = time.monotonic, names_max: int = ABSENT_NAMES_MAX) -> None:
        self._clock = clock
        self._names_max = names_max
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def note_absent(self, name: str) -> None:
        """Add a name that is absent now."""
        with self._lock:
            self._until[name] = self._clock() + ABSENT_S
            self._until.move_to_end(name)
            if len(self._until) > self._names_max:
                self._until.popitem(last=False)

    def take_absent(self, name: str) -> bool:
        """Whether the name was absent recently; removes it, because it is about to be stored."""
        with self._lock:
            until = self._until.pop(name, None)
        return until is not None and self._clock() < until


def _digest(name: str) -> bytes | None:
    """Digest that an object's name spells in hex; None if it is not the name of a frame."""
    last = name.rpartition("/")[2]
    try:
        return bytes.fromhex(last) if len(last) == 32 else None  # noqa: PLR2004  two hex digits for each of 16 bytes
    except ValueError:
        return None
