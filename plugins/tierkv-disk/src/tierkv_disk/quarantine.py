"""Places that held a bad frame once: kept out of service, with the bytes in them, and listed for people.

A disk that lost bytes in one place often does so again. So a place where a read failed, or a frame did not check out,
is not used again when its frame goes; what lies there stays to be looked at. The list is bounded: over the bound, the
places that were listed first return to service.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.types.keys import Key
from tierkv_disk.files import publish
from tierkv_disk.places import PAGE_BYTES, Place, Run, page_of, pages_in, place_at, segment_of

QUARANTINE_NAME = "quarantine.jsonl"
logger = logging.getLogger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class Suspect:
    """Where a bad frame lay. reason: what was seen."""

    key: Key
    runs: tuple[Run, ...]
    reason: str

    @property
    def pages(self) -> int:
        """How many pages are out of service."""
        return pages_in(self.runs)


class Quarantine:
    """The list, in memory and in a file of one JSON object per line. One thread at a time.

    Args:
        directory: of the namespace.
        bytes_max: bytes that may be out of service at once.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._path = directory / QUARANTINE_NAME
        self._bytes_max = bytes_max
        self._saving = threading.Lock()
        self._suspects: dict[Place, Suspect] = {}
        for suspect in read_suspects(directory):
            self._suspects[suspect.runs[0].place] = suspect
        self._in_file = len(self._suspects)
        self._shrink()

    def __len__(self) -> int:
        """How many places are listed."""
        return len(self._suspects)

    def __iter__(self) -> Iterator[Suspect]:
        """What is listed, oldest first."""
        return iter(self._suspects.values())

    def __contains__(self, place: Place) -> bool:
        """Whether a frame that begins here is listed."""
        return place in self._suspects

    @property
    def pages(self) -> int:
        """Pages that are listed."""
        return sum(suspect.pages for suspect in self)

    def add(self, suspect: Suspect) -> list[Suspect]:
        """List a place.

        Returns:
            What is not listed any more, because the bound was reached.
        """
        if suspect.runs[0].place in self._suspects:
            return []
        self._suspects[suspect.runs[0].place] = suspect
        return self._shrink()

    def keep(self, suspects: Iterable[Suspect]) -> None:
        """Strike off all but these."""
        self._suspects = {suspect.runs[0].place: suspect for suspect in suspects}
        if len(self._suspects) < self._in_file:
            self.save()

    def save(self) -> None:
        """Write the file. May be called beside the other methods."""
        with self._saving:
            self._save("".join(map(_line, tuple(self._suspects.values()))))

    def _shrink(self) -> list[Suspect]:
        """Strike off what is too much, the oldest first."""
        released = []
        over = self.pages * PAGE_BYTES - self._bytes_max
        for place, suspect in list(self._suspects.items()):
            if over <= 0:
                break
            released.append(self._suspects.pop(place))
            over -= suspect.pages * PAGE_BYTES
        return released

    def _save(self, text: str) -> None:
        try:
            publish(self._path, text)
        except OSError as error:
            # In memory the list holds; it is lost with the process, and then a bad place may be used once more.
            logger.warning("%s cannot be written: %s", self._path, error)


def _line(suspect: Suspect) -> str:
    runs = [{"segment": segment_of(r.place), "page": page_of(r.place), "pages": r.pages} for r in suspect.runs]
    return json.dumps({"key": suspect.key.hex(), "runs": runs, "reason": suspect.reason}) + "\n"


def read_suspects(directory: Path) -> Iterator[Suspect]:
    """What the list of a namespace says, oldest first. Lines that are not ours are passed over."""
    path = directory / QUARANTINE_NAME
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            told = json.loads(line)
            runs = tuple(Run(place_at(int(r["segment"]), int(r["page"])), int(r["pages"])) for r in told["runs"])
            suspect = Suspect(Key(bytes.fromhex(told["key"])), runs, str(told["reason"]))
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: a line of it is not ours, and is passed over: %.100r", path, line)
            continue
        if runs and all(run.pages > 0 for run in runs):
            yield suspect
