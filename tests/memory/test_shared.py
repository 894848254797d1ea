"""Arena that other processes map: the same memory, found safely, freed with the last process."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.memory.arena import HostArena
from tierkv.memory.shared import ArenaHandle, SharedMemory, attach_arena

PAYLOAD_BYTES = 5000
ATTACH_AND = """
import os, pickle, signal, sys
from tierkv.memory.shared import attach_arena
arena = attach_arena(pickle.loads(bytes.fromhex(sys.argv[1])))
"""
OWN = """
import pickle, sys
from tierkv.memory.arena import HostArena
from tierkv.memory.shared import SharedMemory
shared = SharedMemory()
arena = HostArena(1 << 20, 5000, shared.map)
arena.payload(2)[:] = 5
print(pickle.dumps(shared.arena_handle(arena)).hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    """Shared memory for one test."""
    memory = SharedMemory()
    yield memory
    memory.close()


def arena_of(shared: SharedMemory) -> HostArena:
    """Return an arena of about 85 slots."""
    return HostArena(1 << 20, PAYLOAD_BYTES, shared.map)


def mappings() -> list[str]:
    """Return the files behind this process's mappings of an arena."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "tierkv-arena" in line]


def descriptors() -> list[Path]:
    """Return this process's descriptors of an arena."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "tierkv-arena" in str(link.readlink())]


def child(program: str, handle: ArenaHandle) -> subprocess.Popen[str]:
    """Start a process that attaches and runs ``program``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", ATTACH_AND + program, pickle.dumps(handle).hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_another_process_sees_and_writes_the_same_slots(shared: SharedMemory) -> None:
    """Bytes that a worker's process gathers are sent by the tier's thread, and vice versa."""
    arena = arena_of(shared)
    arena.slot(3)[:5] = b"ours!"
    process = child(
        "print(bytes(arena.slot(3)[:5]).decode(), arena.num_slots); arena.payload(4)[:] = 7", shared.arena_handle(arena)
    )
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"ours! {arena.num_slots}\n")
    assert set(arena.payload(4)) == {7}
    assert not arena.payload(5).any()


def test_a_killed_process_does_no_harm(shared: SharedMemory) -> None:
    """A worker with a mapping is killed (kill -9): the owner continues to read and write."""
    arena = arena_of(shared)
    process = child("arena.payload(1)[:] = 9; print('ready', flush=True); sys.stdin.read()", shared.arena_handle(arena))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert set(arena.payload(1)) == {9}
    arena.payload(1)[:] = 1
    assert set(arena.payload(1)) == {1}


def test_a_killed_owner_leaves_nothing_behind() -> None:
    """The engine's process is killed: its workers continue to read, and the last one frees all memory."""
    owner = subprocess.Popen(
        [sys.executable, "-I", "-c", OWN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    handle = pickle.loads(bytes.fromhex(owner.stdout.readline()))
    arena = attach_arena(handle)
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=60)
    assert set(arena.payload(2)) == {5}
    with pytest.raises(EngineProtocolError, match="ended or closed"):
        attach_arena(handle)
    assert mappings() == ["/memfd:tierkv-arena (deleted)"]
    arena.close()
    assert mappings() == []


def test_other_memory_is_refused(shared: SharedMemory) -> None:
    """Pids and descriptors are reused: another file with the same number must not be taken for the arena."""
    arena = arena_of(shared)
    handle = shared.arena_handle(arena)
    attach_arena(handle).close()
    other = SharedMemory()
    arena_of(other)
    try:
        with pytest.raises(EngineProtocolError, match="is not the arena any more"):
            attach_arena(replace(handle, fd=other._fd))
        with pytest.raises(EngineProtocolError, match="is not the arena any more"):
            attach_arena(replace(handle, num_slots=handle.num_slots + 1))
    finally:
        other.close()
    shared.close()
    with pytest.raises(EngineProtocolError, match="ended or closed its stack"):
        attach_arena(handle)
    with pytest.raises(EngineProtocolError, match="closed"):
        shared.arena_handle(arena)


def test_it_cannot_be_truncated(shared: SharedMemory) -> None:
    """Truncation would end every process that accesses the missing pages with SIGBUS."""
    arena = arena_of(shared)
    handle = shared.arena_handle(arena)
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(fd)


@pytest.mark.parametrize("capacity", [2**45, 2**62, 2**70])
def test_more_than_the_machine_has_is_a_config_error(shared: SharedMemory, capacity: int) -> None:
    """The kernel overcommits shared memory and kills the process that uses it. The error is raised before."""
    with pytest.raises(ConfigError, match=r"^host.capacity = \d+ bytes: .*; lower it$"):
        HostArena(capacity, PAYLOAD_BYTES, shared.map)


def test_the_memory_is_freed(shared: SharedMemory) -> None:
    """It has no name that could outlive a crash, and closing releases all mappings and descriptors."""
    arena = arena_of(shared)
    assert mappings() == ["/memfd:tierkv-arena (deleted)"]
    assert descriptors()
    arena.close()
    shared.close()
    shared.close()
    assert mappings() == []
    assert not descriptors()
