"""Small files of an LMDB tier: read in bounded memory, and recognised despite a bad byte."""

from __future__ import annotations

import errno
import json
from pathlib import Path

from tierkv.abc.places import differs_in_one_byte, read_short_file

_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""This process can open no file at present."""


def read_json(path: Path) -> object:
    """Content of a short JSON file; None if it is absent or damaged.

    Raises:
        OSError: this process has no descriptor or memory to read it. That says nothing about the file.
    """
    try:
        return json.loads(read_short_file(path))
    except OSError as error:
        if error.errno in _NO_FILES:
            raise
        return None
    except (ValueError, RecursionError):
        return None


def text_of(path: Path) -> str:
    """Content of a short file; empty if it cannot be read."""
    try:
        return read_short_file(path).decode(errors="replace").strip()
    except OSError:
        return ""


def has_bad_byte(path: Path, found: object, written: str) -> bool:
    """Whether a JSON file is what this version writes, but for one byte: damage, and no other program's file.

    Args:
        path: of the file.
        found: its content. One of another version is not damaged.
        written: text that this version writes.
    """
    version = json.loads(written)["version"]
    if not isinstance(found, dict) or found.get("version", version) != version:
        return False
    try:
        return differs_in_one_byte(read_short_file(path), written.encode())
    except OSError:
        return False
