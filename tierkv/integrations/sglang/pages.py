"""Pages of a host pool of SGLang, and their copies to and from slots. Does not import SGLang.

A pool names the memory of its pages by addresses and lengths: two pieces for keys and values, two per layer where
layers come first, or one for latent attention. A chunk's payload is these pieces in the pool's order. Pieces are copied
directly between the pool and a slot; there is no tensor between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tierkv.errors import ConfigError
from tierkv.memory.arena import Bytes

Positions: TypeAlias = Any
"""Positions of tokens in a pool: an integer tensor, or a sequence of numbers."""


class HostPool(Protocol):
    """Attributes of SGLang's host pools that the adapter reads."""

    page_size: int
    """Tokens per page."""

    def get_page_buffer_meta(self, indices: Positions) -> tuple[Sequence[int], Sequence[int]]:
        """Return addresses and lengths of the pieces of whole pages, given the positions of all of their tokens."""


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Memory of one page."""

    pieces: tuple[tuple[int, int], ...]
    """Address and length in bytes of each piece."""

    def copy_to(self, payload: Bytes) -> None:
        """Copy the page into the payload of a slot. Any thread; releases the GIL."""
        target = payload.ctypes.data
        for address, length in self.pieces:
            ctypes.memmove(target, address, length)
            target += length

    def copy_from(self, payload: Bytes) -> None:
        """Copy the payload of a slot into the page. Any thread; releases the GIL."""
        source = payload.ctypes.data
        for address, length in self.pieces:
            ctypes.memmove(address, source, length)
            source += length


class PoolPages:
    """Pages of one pool. Any thread.

    Args:
        pool: the pool of SGLang.
        indices: positions of the tokens of any one page, from which the lengths of the pieces are read.

    Attributes:
        page_size: tokens per page.
        piece_bytes: length of each piece of a page.

    Raises:
        ConfigError: the pool does not name the memory of its pages in its layout.
    """

    def __init__(self, pool: HostPool, indices: Positions) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        try:
            lengths = pool.get_page_buffer_meta(indices)[1]
        except (AttributeError, AssertionError, NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"host pool {type(pool).__name__} with layout {getattr(pool, 'layout', None)!r} does not name the "
                f"memory of its pages ({error}); start SGLang with --hicache-mem-layout page_first"
            ) from error
        self.piece_bytes = tuple(int(length) for length in lengths)

    @property
    def page_bytes(self) -> int:
        """Length of a page."""
        return sum(self.piece_bytes)

    def locate(self, indices: Positions, num_pages: int) -> list[PageMemory] | None:
        """Return the memory of pages; None if the pool's answer does not fit that number of pages.

        Args:
            indices: positions of all tokens of the pages, in order.
            num_pages: number of pages.
        """
        if len(indices) != num_pages * self.page_size:
            return None
        addresses, lengths = self._pool.get_page_buffer_meta(indices)
        count = len(self.piece_bytes)
        if len(addresses) != num_pages * count or tuple(map(int, lengths)) != self.piece_bytes * num_pages:
            return None
        pieces = [(int(address), int(length)) for address, length in zip(addresses, lengths, strict=True)]
        return [PageMemory(tuple(pieces[start : start + count])) for start in range(0, len(pieces), count)]
