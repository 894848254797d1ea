"""Restoring of kept tokens when a stack opens: from rows, which are not trusted, to snapshots of listed chunks."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable

from tierkv.kept_tokens.packing import unpack_snapshot
from tierkv.kept_tokens.token_file import TokenFile
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key


def restored_snapshots(file: TokenFile, geometry: Geometry, is_held: Callable[[Key], bool]) -> dict[Key, Snapshot]:
    """Snapshots of the chunks that a tier holds, the oldest first. All other rows are deleted from the file.

    Args:
        file: open file.
        geometry: sizes of groups and chunks; a row of other sizes is none of ours.
        is_held: whether a tier lists a chunk, or may yet list it.
    """
    found: dict[Key, Snapshot] = {}
    useless: list[Key] = []
    for key, row in file.rows():
        try:
            snapshot = unpack_snapshot(row, key, geometry) if is_held(key) else None
        except ValueError:
            snapshot = None
        if snapshot is None:
            useless.append(key)
        else:
            found[key] = snapshot
    if useless:
        with contextlib.suppress(sqlite3.Error):  # a full disk: they are left out again next time
            file.delete(useless)
    return found
