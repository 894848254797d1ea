"""What the backend needs of a store of named byte strings: verbs for one name at a time, and a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

HEAD_BYTES = 4096
"""A frame starts with a header page that holds its checksums: two frames of one length and head are the same frame."""

TEMPORARY = "tmp"
"""Directory of what is being written, where objects are moved to their names when they are whole."""


class TooLongError(Exception):
    """An object is longer than the buffer that is to hold it."""

    def __init__(self, size: int, room: int) -> None:
        super().__init__(f"object of {size} bytes does not fit the buffer of {room}")


class Store(Protocol):
    """Names and bytes, on any threads. Verbs raise whatever the library underneath raises.

    A name that is absent is :class:`FileNotFoundError` where a verb needs it.
    """

    is_remote: bool
    """Whether waiting for it dominates, so that requests of one batch should run side by side."""

    def exists(self, name: str) -> bool:
        """Whether an object of that name is stored."""

    def read(self, name: str) -> bytes:
        """A short object whole."""

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Place an object at the start of ``buffer``; its length. Raises :class:`TooLongError` and places nothing."""

    def holds(self, name: str, data: memoryview) -> bool:
        """Whether the object is there with this length and these first HEAD_BYTES."""

    def write(self, name: str, data: memoryview) -> None:
        """Store an object: readers see the old one or the new one, whole."""

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Store an object unless one of that name is there; whether it was stored.

        The server decides where it can, so of several writers one succeeds; else a look before decides.
        """

    def delete(self, name: str) -> None:
        """Forget an object. An absent one is no error."""

    def pages(self) -> Iterator[Sequence[str]]:
        """Names of objects, some at a time, each time one request's worth; other names may be among them."""

    def close(self) -> None:
        """Release what is held."""


def place(data: bytes | memoryview, buffer: memoryview) -> int:
    """Copy ``data`` to the start of ``buffer`` without holding the GIL; its length.

    Raises:
        TooLongError: it does not fit; nothing was placed.
    """
    size = len(data)
    if size > len(buffer):
        raise TooLongError(size, len(buffer))
    if size:
        np.copyto(np.frombuffer(buffer, np.uint8, size), np.frombuffer(data, np.uint8))
    return size
