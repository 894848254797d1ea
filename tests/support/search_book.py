"""Groups for the search, a book of answers about their chunks, and the rule of S44 written down as it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult

LETTERS = {
    "T": LookupResult.HIT,
    "P": LookupResult.PENDING,
    "F": LookupResult.MISS,
    "N": LookupResult.RETRY,
    "M": LookupResult.RETRY,
}
"""What a book answers. N and M are unknown at first; later N turns out to be there, and M to be missing."""


class Book:
    """Answers per key, one string of letters per group, and who asked."""

    def __init__(self, *groups: str) -> None:
        self.calls: list[Key] = []
        self.letters = {
            key: letter
            for group, letters in enumerate(groups)
            for key, letter in zip(keys_of(group, len(letters)), letters, strict=True)
        }

    def __call__(self, key: Key) -> LookupResult:
        self.calls.append(key)
        return LETTERS[self.letters[key]]

    def become_known(self, key: Key) -> None:
        """An unknown chunk is unknown no more."""
        self.letters[key] = {"N": "T", "M": "F"}[self.letters[key]]

    def asked(self) -> set[Key]:
        """Unknown chunks that were asked for."""
        return {key for key in self.calls if self.letters[key] in "NM"}

    def present(self, unknown: bool | None = None) -> Callable[[Key], bool]:
        """Whether a chunk is there; unknown ones are as they will turn out, or all as ``unknown`` says."""

        def is_present(key: Key) -> bool:
            letter = self.letters[key]
            if unknown is not None and letter in "NM":
                return unknown
            return letter in "TPN"

        return is_present

    def resident_prefix(self, keys: Sequence[Key], start: int, stop: int) -> int:
        """The shortcut that a host index offers."""
        count = 0
        while start + count < stop and self.letters[keys[start + count]] == "T":
            count += 1
        return count


def keys_of(group: int, count: int) -> list[Key]:
    """Keys of a group's first chunks."""
    return [make_key(b"chunk %d" % i, group) for i in range(count)]


def full(index: int, chunk_tokens: int, count: int) -> SearchGroup:
    """A group with full attention and so many chunks."""
    return SearchGroup(chunk_tokens, keys_of(index, count))


def window(index: int, chunk_tokens: int, count: int, window_chunks: int, end_slack: int | None = None) -> SearchGroup:
    """A group with a window of so many chunks."""
    return SearchGroup(chunk_tokens, keys_of(index, count), window_chunks, end_slack)


def oracle(groups: Sequence[SearchGroup], computed: int, tokens_max: int, present: Callable[[Key], bool]) -> int:
    """S44's rule, by trying every length from the longest down. Knows nothing of how the search goes about it."""
    for hit in range(tokens_max - computed, 0, -1):
        if all(_serves(group, computed, computed + hit, present) for group in groups):
            return hit if all(hit >= group.chunk_tokens for group in groups) else 0
    return 0


def _serves(group: SearchGroup, computed: int, end: int, present: Callable[[Key], bool]) -> bool:
    if end > len(group.keys) * group.chunk_tokens:
        return False
    if group.end_slack is not None and -end % group.chunk_tokens > group.end_slack:
        return False
    return all(present(group.keys[i]) for i in needed(group, computed, end))


def needed(group: SearchGroup, computed: int, end: int) -> list[int]:
    """The chunks that hold any token from ``computed`` to ``end``; of a window, the last of them."""
    size = group.chunk_tokens
    holding = [i for i in range(-(-end // size)) if (i + 1) * size > computed]
    return holding if group.window_chunks is None else holding[-group.window_chunks :]
