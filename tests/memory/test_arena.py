"""Host arena: sizes, alignment, and a close that never unmaps memory under a view."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.memory.arena import HostArena


def test_capacity_is_cut_into_whole_slots() -> None:
    """The arena never takes more memory than its configured capacity."""
    arena = HostArena(5 * (4096 + 8192) + 4095, 5000)
    assert (arena.num_slots, arena.slot_bytes) == (5, 4096 + 8192)


def test_slots_are_aligned() -> None:
    """O_DIRECT refuses memory that does not start at a multiple of 4096."""
    arena = HostArena(1 << 20, 5000)
    for index in range(arena.num_slots):
        assert np.frombuffer(arena.slot(index), np.uint8).ctypes.data % 4096 == 0
        assert arena.payload(index).ctypes.data % 4096 == 0


def test_payload_is_the_slot_behind_the_header() -> None:
    """The worker writes through one view, and the tier reads through the other."""
    arena = HostArena(1 << 20, 5000)
    arena.payload(3)[:] = 7
    assert set(arena.slot(3)[HEADER_BYTES:]) == {7}
    assert set(arena.slot(3)[:HEADER_BYTES]) == {0}
    arena.slot(3)[HEADER_BYTES] = 9
    assert arena.payload(3)[0] == 9
    assert len(arena.payload(3)) == arena.slot_bytes - HEADER_BYTES


def test_slots_do_not_overlap() -> None:
    """A chunk that fills its slot must not touch its neighbours."""
    arena = HostArena(1 << 20, 5000)
    for index in range(arena.num_slots):
        arena.slot(index)[:] = bytes([index % 251]) * arena.slot_bytes
    for index in range(arena.num_slots):
        assert set(arena.slot(index)) == {index % 251}


@pytest.mark.parametrize("index", [-1, 10**9])
def test_a_slot_outside_the_arena_is_refused(index: int) -> None:
    """A slice beyond the end would silently be empty, and -1 would be another chunk's slot."""
    arena = HostArena(1 << 20, 5000)
    with pytest.raises(IndexError):
        arena.slot(index)
    with pytest.raises(IndexError):
        arena.payload(arena.num_slots if index > 0 else index)


def test_too_small_names_both_numbers() -> None:
    """The operator must see the given and the needed size."""
    with pytest.raises(ConfigError, match=r"^host\.capacity = 12287 bytes holds no chunk: one takes 12288 bytes"):
        HostArena(12287, 5000)


@pytest.mark.parametrize("capacity", [2**62, 2**70])
def test_more_than_the_system_has_is_a_config_error(capacity: int) -> None:
    """A typing error in the capacity must not cause a traceback of mmap."""
    with pytest.raises(ConfigError, match=r"^host.capacity = \d+ bytes: .*; lower it$"):
        HostArena(capacity, 5000)


def test_a_chunk_of_no_bytes_is_refused() -> None:
    """This detects an engine that declares a page size of zero."""
    with pytest.raises(ConfigError, match="at least one byte"):
        HostArena(1 << 20, 0)


def test_close_twice_and_then_nothing_works() -> None:
    """Shutdown runs on error paths too."""
    arena = HostArena(1 << 20, 5000)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match=r"closed|released"):
        arena.payload(0)
    with pytest.raises(ValueError, match="released"):
        arena.slot(0)


def test_views_outlive_close() -> None:
    """A hung I/O thread may still write into its slot: that must hit memory, not a hole in the address space.

    In a process of its own, because the failure that this test is for is a segfault.
    """
    program = """
import gc
from tierkv.memory.arena import HostArena
arena = HostArena(1 << 20, 5000)
slot, payload = arena.slot(1), arena.payload(2)
arena.close()
del arena
gc.collect()
slot[:] = b"x" * len(slot)
payload[:] = 3
assert slot[5] == ord("x") and payload.sum() == 3 * len(payload)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_memory_returns_when_the_last_view_is_gone() -> None:
    """The garbage collector must be able to free the memory."""
    arena = HostArena(1 << 20, 5000)
    inner = arena._mmap
    slot = arena.slot(0)
    arena.close()
    assert not inner.closed
    slot.release()
    del arena
    gc.collect()
    inner.close()
    assert inner.closed
