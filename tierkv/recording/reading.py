"""Reads a record, also one that is still being written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tierkv.errors import ConfigError
from tierkv.recording.entries import Entry

POLL_S = 0.2
"""How often a record that is followed is looked at."""


def files_of(path: Path) -> list[Path]:
    """The files of a record, oldest first.

    Raises:
        ConfigError: there is none.
    """
    numbered = {
        int(match[1]): other
        for other in path.parent.glob(f"{path.name}.*")
        if (match := re.fullmatch(re.escape(path.name) + r"\.(\d+)", other.name))
    }
    found = [numbered[number] for number in sorted(numbered, reverse=True)]
    if path.exists():
        found.append(path)
    if not found:
        raise ConfigError(
            f"{path}: there is no such record; it is the file that the stack's configuration names under record.path"
        )
    return found


def read(path: Path) -> Iterator[Entry]:
    """All entries so far, oldest first. Lines that are not whole are left out.

    Raises:
        ConfigError: there is no such record, or it cannot be read.
    """
    for file in files_of(path):
        try:
            with file.open("rb") as lines:
                yield from _entries(lines)
        except FileNotFoundError:
            continue  # rotated away meanwhile
        except OSError as error:
            raise ConfigError(f"{file}: the record cannot be read: {error.strerror or error}") from error


def follow(path: Path, pause: Callable[[float], None]) -> Iterator[Entry]:
    """All entries so far, then those that come, for ever. Follows the record from file to file.

    Raises:
        ConfigError: there is no such record.
    """
    files_of(path)
    known: os.stat_result | None = None
    while True:
        behind = _files_behind(path, known)
        try:
            lines = behind[0].open("rb")
        except (IndexError, FileNotFoundError):  # between two files, or renamed since we looked
            pause(POLL_S)
            continue
        with lines:
            known = os.fstat(lines.fileno())
            yield from _entries(lines)
            while not _files_behind(path, known):
                pause(POLL_S)
                yield from _entries(lines)
            yield from _entries(lines)  # what came between the last look and the change of files


def _files_behind(path: Path, known: os.stat_result | None) -> list[Path]:
    """The files that came after a known one, oldest first; all, if it is not among them any more."""
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
    """Whole lines from where the file stands; it is left standing before a line that is still being written."""
    while line := lines.readline():
        if not line.endswith(b"\n"):
            lines.seek(-len(line), 1)
            return
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if isinstance(entry, dict) and "is" in entry:
            yield entry
