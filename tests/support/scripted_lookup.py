"""Groups for the search, a lookup with scripted answers, and the rule of S44 by brute force."""

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
"""Answers per letter. N and M are unknown at first; later N turns out to be present, and M to be absent."""


class ScriptedLookup:
    """Answers per key from one string of letters per group. Records its calls."""

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
        """Make an unknown chunk known."""
        self.letters[key] = {"N": "T", "M": "F"}[self.letters[key]]

    def asked(self) -> set[Key]:
        """Unknown chunks that were looked up."""
        return {key for key in self.calls if self.letters[key] in "NM"}

    def present(self, unknown: bool | None = None) -> Callable[[Key], bool]:
        """Whether a chunk is present; unknown ones by their later answer, or all as ``unknown`` says."""

        def is_present(key: Key) -> bool:
            letter = self.letters[key]
            if unknown is not None and letter in "NM":
                return unknown
            return letter in "TPN"

        return is_present

    def resident_prefix(self, keys: Sequence[Key], start: int, stop: int) -> int:
        """Shortcut of a host index."""
        count = 0
        while start + count < stop and self.letters[keys[start + count]] == "T":
            count += 1
        return count


def keys_of(group: int, count: int) -> list[Key]:
    """Keys of a group's first chunks."""
    return [make_key(b"chunk %d" % i, group) for i in range(count)]


def full(index: int, chunk_tokens: int, count: int) -> SearchGroup:
    """Group with full attention and ``count`` chunks."""
    return SearchGroup(chunk_tokens, keys_of(index, count))


def window(index: int, chunk_tokens: int, count: int, window_chunks: int, end_slack: int | None = None) -> SearchGroup:
    """Group with ``count`` chunks and a window."""
    return SearchGroup(chunk_tokens, keys_of(index, count), window_chunks, end_slack)


def oracle(groups: Sequence[SearchGroup], computed: int, tokens_max: int, present: Callable[[Key], bool]) -> int:
    """Hit by S44's rule: try every length from the longest down, without the search."""
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
    """Chunks with any token from ``computed`` to ``end``; of a window, the last of them."""
    size = group.chunk_tokens
    holding = [i for i in range(-(-end // size)) if (i + 1) * size > computed]
    return holding if group.window_chunks is None else holding[-group.window_chunks :]
