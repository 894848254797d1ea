"""Queue of the chunks that are to be deleted from one lower tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tierkv.types.keys import Key


class DeletionQueue:
    """Deletions that are due, and those that failed and are repeated later. Sans-IO; O(1) per key.

    Args:
        retry_s: seconds after which a deletion is repeated.
    """

    __slots__ = ("_due", "_retries", "_retry_s")

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._due: deque[Key] = deque()
        self._retries: deque[tuple[float, Key]] = deque()

    def __len__(self) -> int:
        """Number of deletions that wait, due or not."""
        return len(self._due) + len(self._retries)

    def schedule(self, keys: Iterable[Key]) -> None:
        """Add chunks to delete from the next step on."""
        self._due.extend(keys)

    def retry(self, key: Key, now: float) -> None:
        """Add a chunk whose deletion failed."""
        self._retries.append((now + self._retry_s, key))

    def take(self, now: float, keys_max: int) -> list[Key]:
        """Take up to ``keys_max`` chunks to delete now: those scheduled first, and retries that are due."""
        retries, due = self._retries, self._due
        while retries and retries[0][0] <= now:
            due.append(retries.popleft()[1])
        return [due.popleft() for _ in range(min(keys_max, len(due)))]
