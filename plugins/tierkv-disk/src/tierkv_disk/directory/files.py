"""Durable names: directories forced to the device, small documents published atomically."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

TEMPORARY_PREFIX = ".tierkv-disk."
TEMPORARY_SUFFIX = ".tmp"


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(name: str) -> str:
    """Name that no other thread or process uses, and that the next open removes."""
    writer = f"{os.getpid()}-{threading.get_ident()}"  # two stacks of one process may claim one path at once
    return f"{TEMPORARY_PREFIX}{name}.{writer}{TEMPORARY_SUFFIX}"


def is_temporary(name: str) -> bool:
    """Whether ``name`` comes from :func:`temporary_name`."""
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)


def publish_text(path: Path, content: str) -> None:
    """Write a small text file atomically and durably: after a power cut it has the old or the new content."""
    temporary = path.parent / temporary_name(path.name)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def publish_document(path: Path, document: Mapping[str, object]) -> None:
    """Write a small JSON file atomically and durably."""
    publish_text(path, json.dumps(document, indent=2) + "\n")
