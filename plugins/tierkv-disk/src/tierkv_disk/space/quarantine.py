"""Quarantine of pages that held a bad frame: kept out of service with their bytes, and listed in a file for the user.

A disk that lost bytes in one place often does so again. Pages where a read failed, or where a frame failed
verification, are therefore not reused when the frame is deleted, and their content remains for inspection. The list is
bounded: beyond the bound, the oldest entries return to service.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tierkv.abc.logs import plugin_logger
from tierkv.types.keys import Key
from tierkv_disk.directory.files import publish_text, read_text
from tierkv_disk.extents import PAGE_BYTES, PAGES_MAX, PageAddress, Run, address_at, page_of, pages_in, segment_of

QUARANTINE_NAME = "quarantine.jsonl"
FILE_BYTES_MAX = 16 << 20
"""Longest list that is read."""
logger = plugin_logger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """Pages of one bad frame."""

    key: Key
    runs: tuple[Run, ...]
    reason: str
    """The observed failure, in words."""

    @property
    def pages(self) -> int:
        """Number of pages out of service."""
        return pages_in(self.runs)


class Quarantine:
    """List of entries, in memory and in a file of one JSON object per line. One thread at a time.

    Args:
        directory: of the namespace.
        bytes_max: bytes that may be out of service at once.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._path = directory / QUARANTINE_NAME
        self._bytes_max = bytes_max
        self._saving = threading.Lock()
        self._is_failing = False
        self._entries: dict[PageAddress, QuarantineEntry] = {}
        for entry in read_quarantine(directory):
            self._entries[entry.runs[0].address] = entry
        self._in_file = len(self._entries)
        self._shrink()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    def __iter__(self) -> Iterator[QuarantineEntry]:
        """Entries, oldest first."""
        return iter(self._entries.values())

    def __contains__(self, address: PageAddress) -> bool:
        """Whether a frame that begins at ``address`` is listed."""
        return address in self._entries

    @property
    def pages(self) -> int:
        """Number of pages in all entries."""
        return sum(entry.pages for entry in self)

    def add_entry(self, entry: QuarantineEntry) -> list[QuarantineEntry]:
        """List an entry.

        Returns:
            The entries that the bound pushed out of the list.
        """
        if entry.runs[0].address in self._entries:
            return []
        self._entries[entry.runs[0].address] = entry
        return self._shrink()

    def keep_only(self, entries: Iterable[QuarantineEntry]) -> None:
        """Remove all but these entries."""
        self._entries = {entry.runs[0].address: entry for entry in entries}
        if len(self._entries) < self._in_file:
            self.save()

    def save(self) -> None:
        """Write the file. May be called beside the other methods."""
        with self._saving:
            self._save("".join(map(_line, tuple(self._entries.values()))))

    def _shrink(self) -> list[QuarantineEntry]:
        """Remove entries beyond the bound, oldest first."""
        released = []
        over = self.pages * PAGE_BYTES - self._bytes_max
        for address, entry in list(self._entries.items()):
            if over <= 0:
                break
            released.append(self._entries.pop(address))
            over -= entry.pages * PAGE_BYTES
        return released

    def _save(self, text: str) -> None:
        try:
            publish_text(self._path, text)
        except OSError as error:
            # The list in memory still holds. After a restart, a bad page may be used once more.
            if not self._is_failing:
                logger.warning("%s cannot be written, and is tried again with each entry: %s", self._path, error)
            self._is_failing = True
            return
        self._is_failing = False


def _line(entry: QuarantineEntry) -> str:
    runs = [{"segment": segment_of(r.address), "page": page_of(r.address), "pages": r.pages} for r in entry.runs]
    return json.dumps({"key": entry.key.hex(), "runs": runs, "reason": entry.reason}) + "\n"


def read_quarantine(directory: Path) -> Iterator[QuarantineEntry]:
    """Entries in the file of a namespace, oldest first. Unreadable lines are skipped and logged."""
    path = directory / QUARANTINE_NAME
    try:
        lines = read_text(path, FILE_BYTES_MAX).splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s is ignored: %s", path, error)
        return
    for line in lines:
        try:
            fields = json.loads(line)
            runs = tuple(_run(int(r["segment"]), int(r["page"]), int(r["pages"])) for r in fields["runs"])
            entry = QuarantineEntry(Key(bytes.fromhex(fields["key"])), runs, str(fields["reason"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            logger.warning("%s: skipped a line that is not a quarantine entry: %.100r", path, line)
            continue
        if _are_possible(runs):
            yield entry
        else:
            logger.warning("%s: skipped an entry whose pages cannot be: %.100r", path, line)


def _run(segment: int, page: int, pages: int) -> Run:
    """Run at a position.

    Raises:
        ValueError: there is no such page.
    """
    if not 0 <= page < PAGES_MAX:
        raise ValueError(f"page {page} of a segment")
    return Run(address_at(segment, page), pages)


def _are_possible(runs: tuple[Run, ...]) -> bool:
    """Whether runs are within segments, and no two of them overlap."""
    if not runs or any(r.pages < 1 or r.address < 0 or page_of(r.address) + r.pages > PAGES_MAX for r in runs):
        return False
    ordered = sorted(runs)
    return all(first.address + first.pages <= second.address for first, second in pairwise(ordered))
