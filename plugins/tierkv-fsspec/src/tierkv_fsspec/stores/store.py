"""Protocol of a store of named byte strings: verbs for one name at a time, and a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tierkv.abc.places import SHORT_FILE_BYTES_MAX

HEAD_BYTES = 4096
"""Length of a frame's header page, which holds its checksums. Frames of equal length and head are equal."""

SHORT_BYTES_MAX = SHORT_FILE_BYTES_MAX
"""Longest manifest that is read, in bytes."""

FOLDER_CHARS = 2
"""Length of the names of the directories of frames: two hex digits."""

TEMPORARY = "tmp"
"""Directory of temporary files; complete ones are moved to their names."""


class TooLongError(Exception):
    """An object is longer than the buffer provided for it."""

    def __init__(self, size: int, room: int) -> None:
        super().__init__(f"object of {size} bytes does not fit the buffer of {room}")


class FailedAnswerError(Exception):
    """A server answered with an error that is too long to be received."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status code: {status}")


class ListedObject(NamedTuple):
    """One object of a listing."""

    name: str
    """Its name within the store."""
    size: int
    """Its length in bytes."""
    modified_s: float | None
    """Time of its last write in seconds since 1970; None: the server does not say."""


class Store(Protocol):
    """Objects by name; may be used on any threads. Verbs raise whatever the library below raises.

    An absent name is a :class:`FileNotFoundError` where a verb needs it.
    """

    is_remote: bool
    """Whether latency dominates, so that the requests of one batch should run side by side."""

    def exists(self, name: str) -> bool:
        """Whether an object of that name is stored."""

    def read(self, name: str) -> bytes:
        """Read a short object whole.

        Raises:
            TooLongError: it is longer than :data:`SHORT_BYTES_MAX`; no more was fetched into memory.
        """

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Copy an object to the start of ``buffer``. Returns its length.

        Raises:
            TooLongError: it does not fit; the buffer is unchanged.
        """

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Whether the object exists with the same length and the same first HEAD_BYTES."""

    def write(self, name: str, data: memoryview) -> None:
        """Store an object atomically: readers see the old object or the new one."""

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Store an object unless its name exists. Returns whether it was stored.

        If the server can decide, one of several writers succeeds. Otherwise a lookup before the write decides.
        """

    def delete(self, name: str) -> None:
        """Delete an object; an absent one is no error."""

    def list_names(self) -> Iterator[Sequence[str]]:
        """Names of objects, one sequence per request. Other names may be among them."""

    def list_objects(self) -> Iterator[Sequence[ListedObject]]:
        """Objects two levels down, such as frames; one sequence per request. Other objects may be among them."""

    def list_children(self) -> Iterator[str]:
        """Names of the directories directly below, without slashes."""

    def read_head(self, name: str) -> bytes:
        """Read the first HEAD_BYTES of an object, or all of a shorter one."""

    def close(self) -> None:
        """Release connections and threads."""


def copy_into(data: bytes | memoryview, buffer: memoryview) -> int:
    """Copy ``data`` to the start of ``buffer`` without holding the GIL. Returns its length.

    Raises:
        TooLongError: it does not fit; the buffer is unchanged.
    """
    size = len(data)
    if size > len(buffer):
        raise TooLongError(size, len(buffer))
    if size:
        np.copyto(np.frombuffer(buffer, np.uint8, size), np.frombuffer(data, np.uint8))
    return size


def short(data: bytes) -> bytes:
    """Return the content of a short object, of which up to one byte too many was fetched.

    Raises:
        TooLongError: it is longer than :data:`SHORT_BYTES_MAX`.
    """
    if len(data) > SHORT_BYTES_MAX:
        raise TooLongError(len(data), SHORT_BYTES_MAX)
    return data
