"""An arena that other processes map: the same memory, found safely, gone when the last process is gone."""

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
    """Memory for one test."""
    memory = SharedMemory()
    yield memory
    memory.close()


def arena_of(shared: SharedMemory) -> HostArena:
    """An arena of some 85 slots."""
    return HostArena(1 << 20, PAYLOAD_BYTES, shared.map)


def mappings() -> list[str]:
    """Files behind this process's mappings of an arena."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "tierkv-arena" in line]


def descriptors() -> list[Path]:
    """This process's descriptors of an arena."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if "tierkv-arena" in str(link.readlink())]


def child(program: str, handle: ArenaHandle) -> subprocess.Popen[str]:
    """Another process that attaches and runs ``program``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", ATTACH_AND + program, pickle.dumps(handle).hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_another_process_sees_and_writes_the_same_slots(shared: SharedMemory) -> None:
    """What the worker's process gathers is what the tier's thread sends, and the other way round."""
    arena = arena_of(shared)
    arena.slot(3)[:5] = b"ours!"
    process = child(
        "print(bytes(arena.slot(3)[:5]).decode(), arena.num_slots); arena.payload(4)[:] = 7", shared.arena_handle(arena)
    )
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"ours! {arena.num_slots}\n")
    assert set(arena.payload(4)) == {7}
    assert not arena.payload(5).any()


def test_a_killed_process_takes_nothing_along(shared: SharedMemory) -> None:
    """A worker that has the arena mapped dies by kill -9: the owner reads and writes on."""
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
    """The other way round: the engine's process dies, its workers read on without harm, and the last one frees all."""
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


def test_what_is_not_the_arena_is_refused(shared: SharedMemory) -> None:
    """Pids and descriptors are reused: another file behind the same number must not be taken for the arena."""
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


def test_nobody_can_cut_it_off(shared: SharedMemory) -> None:
    """A shortened file would end every process that touches the missing pages with SIGBUS."""
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
    """The kernel promises shared memory that it does not have, and kills the process that uses it; we say it first."""
    with pytest.raises(ConfigError, match="lower its capacity"):
        HostArena(capacity, PAYLOAD_BYTES, shared.map)


def test_the_memory_is_given_back(shared: SharedMemory) -> None:
    """It has no name that could outlive a crash, and closing leaves no mapping and no descriptor open."""
    arena = arena_of(shared)
    assert mappings() == ["/memfd:tierkv-arena (deleted)"]
    assert descriptors()
    arena.close()
    shared.close()
    shared.close()
    assert mappings() == []
    assert not descriptors()
