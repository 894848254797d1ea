"""Reading of a record, including one that is still being written: all entries, or those about one subject."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from tierkv._version import __version__
from tierkv.abc.places import exists
from tierkv.errors import ConfigError
from tierkv.recording.entries import READ_VERSIONS, Entry, matches
from tierkv.recording.shapes import is_whole

POLL_S = 0.2
"""Seconds between two looks at a followed record."""
LINE_BYTES_MAX = 16 << 20
"""Longest line that is read. The longest of a stack, its metrics, has some tens of kilobytes."""


def files_of(path: Path) -> list[Path]:
    """Return the files of a record, oldest first.

    Raises:
        ConfigError: there is none.
    """
    numbered = {
        int(match[1]): other
        for other in path.parent.glob(f"{path.name}.*")
        if (match := re.fullmatch(re.escape(path.name) + r"\.(\d+)", other.name))
    }
    found = [numbered[number] for number in sorted(numbered, reverse=True)]
    if exists(path):
        found.append(path)
    if not found:
        raise ConfigError(
            f"{path}: there is no such record; it is the file that the stack's configuration names under record.path"
        )
    return found


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield all entries so far, oldest first. Incomplete and damaged lines are skipped.

    Raises:
        ConfigError: there is no such record, it cannot be read, it is no record, or one of another version.
    """
    is_record = False
    for file in files_of(path):
        try:
            with file.open("rb") as lines:
                for entry in _entries(lines):
                    is_record = True
                    yield entry
        except FileNotFoundError:
            continue  # rotated away meanwhile
        except IsADirectoryError as error:
            raise ConfigError(
                f"{file}: is a directory; give the file that the stack's configuration names under record.path"
            ) from error
        except OSError as error:
            raise ConfigError(f"{file}: the record cannot be read: {error.strerror or error}") from error
    if not is_record:
        raise _no_record(path)


def follow_entries(path: Path, sleep: Callable[[float], None]) -> Iterator[Entry]:
    """Yield all entries so far, then new ones, without end. Follows the record from file to file.

    Raises:
        ConfigError: as :func:`read_entries`.
    """
    for entry in entries_so_far(path):
        if entry is None:
            sleep(POLL_S)
        else:
            yield entry


def entries_so_far(path: Path) -> Iterator[Entry | None]:
    """Yield all entries so far, then None, then the ones since then, and so on. Follows it from file to file.

    Raises:
        ConfigError: as :func:`read_entries`.
    """
    files_of(path)
    known: os.stat_result | None = None
    is_record = False
    while True:
        behind = _files_behind(path, known)
        try:
            lines = behind[0].open("rb")
        except (IndexError, FileNotFoundError):  # between two files, or renamed since the last look
            yield None
            continue
        with lines:
            known = os.fstat(lines.fileno())
            while True:
                for entry in _entries(lines):
                    is_record = True
                    yield entry
                if _files_behind(path, known):
                    break
                if not is_record and lines.tell():  # at 0, the first line is still being written
                    raise _no_record(path)
                yield None
            yield from _entries(lines)  # entries between the last look and the change of files


def _files_behind(path: Path, known: os.stat_result | None) -> list[Path]:
    """Return the files newer than a known one, oldest first; all files, if the known one was deleted."""
    try:
        files = files_of(path)
    except ConfigError:
        return []
    for i, file in enumerate(files):
        try:
            if known is not None and os.path.samestat(file.stat(), known):
                return files[i + 1 :]
        except FileNotFoundError:
            continue
    return files


def _entries(lines: BinaryIO) -> Iterator[Entry]:
    """Yield whole entries from the current position; stop before a line that is still being written."""
    while line := lines.readline(LINE_BYTES_MAX):
        if not line.endswith(b"\n"):
            if len(line) < LINE_BYTES_MAX:
                lines.seek(-len(line), 1)
                return
            continue  # the parts of a line that no stack wrote are no entries either
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut short by a kill, or damaged
        _check_version(entry, lines.name)
        if is_whole(entry):
            yield entry


def _no_record(path: Path) -> ConfigError:
    is_empty = not any(file.stat().st_size for file in files_of(path))
    why = "the file is empty" if is_empty else "none of its lines is an entry of one"
    return ConfigError(
        f"{path}: this is no record of a stack: {why}; give the file that the stack's configuration names under "
        "record.path"
    )


def _check_version(entry: object, name: str) -> None:
    """Refuse the first line of a file that another version wrote: entries that are not understood would be missed.

    Raises:
        ConfigError: it is one.
    """
    if not isinstance(entry, dict) or entry.get("is") != "record" or entry.get("version", 1) in READ_VERSIONS:
        return
    raise ConfigError(
        f"{name}: this is a record of version {str(entry['version'])[:20]}, and tierkv {__version__} reads "
        f"{' and '.join(map(str, READ_VERSIONS))}; read it with the tierkv that wrote it"
    )


NAMES_COMPARED_MAX = 20_000
"""Names compared in the search for similar ones."""


class EntryFilter(Protocol):
    """Selection of entries. It is asked about each entry of a record once, in order."""

    def includes(self, entry: Entry) -> bool:
        """Whether the entry is selected."""


class KeyFilter:
    """Entries that name a key, and the ends of operations and transfers that do."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.found: set[str] = set()
        self.known: dict[str, None] = {}
        self._ops: set[int] = set()
        self._jobs: set[int] = set()
        self._tiers: set[str] = set()

    def includes(self, entry: Entry) -> bool:
        """Whether the entry is selected."""
        named = self._named(entry)
        kind = entry["is"]
        if kind == "record":
            self._ops.clear()
            self._jobs.clear()
            self._tiers.clear()
        elif kind == "op" and named:
            self._ops.add(entry["op"])
        elif kind == "op end" and entry["op"] in self._ops:
            if not entry["late"]:
                self._ops.discard(entry["op"])
            return True
        elif kind == "job" and named:
            self._jobs.add(entry["job"])
        elif kind == "job end" and entry["job"] in self._jobs:
            self._jobs.discard(entry["job"])
            return True
        elif kind == "chunks":
            if named and entry["event"] == "stored":
                self._tiers.add(entry["tier"])
            is_removed = named if entry["event"] == "removed" else entry["event"] == "cleared"
            if is_removed and entry["tier"] in self._tiers:
                self._tiers.discard(entry["tier"])
                return True
        return named

    def _named(self, entry: Entry) -> bool:
        keys = [key for field in ("keys", "failed", "wanted") for key in entry.get(field, ())]
        keys += entry.get("bad", ())
        keys += [entry["missing"]] if "missing" in entry else []
        matching = [key for key in keys if matches(key, self.key)]
        self.found.update(matching)
        for key in keys:
            self.known[key] = None
        return bool(matching)


class RequestFilter:
    """Entries of a request, and the operations of tiers on chunks that it waited for."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_known = False
        self.known: dict[str, None] = {}
        self._wanted: set[str] = set()
        self._ops: dict[int, list[str]] = {}

    def includes(self, entry: Entry) -> bool:
        """Whether the entry is selected."""
        if "r" in entry:
            self.known[entry["r"]] = None
            if entry["r"] != self.request_id:
                return False
            self.is_known = True
            if entry["is"] == "answer":  # a streamed hit is offered before all of its chunks are ready
                is_complete = entry["tokens"] is not None and entry["ready"] == entry["chunks"]
                self._wanted = set() if is_complete else set(entry["wanted"])
            elif entry["is"] == "request" and entry["before"] == "loading":
                self._wanted.clear()
            return True
        kind = entry["is"]
        if kind == "op":
            self._ops.setdefault(entry["op"], []).extend(entry["keys"])
            return not self._wanted.isdisjoint(entry["keys"])
        if kind == "op end":  # the operation may have begun before this request wanted its chunks
            keys = self._ops.get(entry["op"], []) if entry["late"] else self._ops.pop(entry["op"], [])
            return not self._wanted.isdisjoint(keys)
        if kind == "record":
            self._ops.clear()
        if kind == "chunks" and entry["event"] == "removed":
            return not self._wanted.isdisjoint(entry["keys"])
        return bool(self._wanted) and kind in {"health", "reset"}


class FailureFilter:
    """Entries about failures: operations, transfers, stores, tiers, and lost entries."""

    def includes(self, entry: Entry) -> bool:
        """Whether the entry is selected."""
        match entry["is"]:
            case "op end":
                harmless = entry["verb"] == "probe" and all(why == "absent" for why in entry["bad"].values())
                return entry["late"] or (bool(entry["bad"]) and not harmless)
            case "job end":
                return bool(entry["failed"])
            case "health" | "lost" | "not stored":
                return True
        return False


def filter_entries(entries: Iterable[Entry], wanted: EntryFilter) -> Iterator[Entry]:
    """Yield the selected entries; before the first one of each process, the line that identifies the process."""
    opened: Entry | None = None
    for entry in entries:
        is_wanted = wanted.includes(entry)
        if entry["is"] == "record":
            opened = entry
        elif is_wanted:
            if opened is not None:
                yield opened
                opened = None
            yield entry


def last_entries(entries: Iterable[Entry], wanted: EntryFilter, count: int) -> list[Entry]:
    """Return the last ``count`` selected entries."""
    return list(deque(filter_entries(entries, wanted), maxlen=count))


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three names most similar to ``name``: those with the same beginning, otherwise close matches."""
    names = list(known)[-NAMES_COMPARED_MAX:]
    beginning = name[: max(2, len(name) // 2)]
    same = [other for other in names if other.startswith(beginning)]
    return same[:3] or difflib.get_close_matches(name, names, n=3, cutoff=0.3)
