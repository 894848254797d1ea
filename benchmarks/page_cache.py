"""Files out of the page cache, so that a read reaches the disk."""

from __future__ import annotations

import os
from pathlib import Path


def drop_page_cache(directory: Path) -> None:
    """Write the files below a directory to their disk, and drop them from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
