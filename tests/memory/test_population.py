"""Population of an arena in the background: pages are there before chunks need them, and nothing else changes."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import threading
from pathlib import Path

import pytest

import tierkv
from tierkv.memory import arena as arena_module
from tierkv.memory.arena import HostArena
from tierkv.memory.available import available_bytes, usable_bytes
from tierkv.memory.population import PAUSE_SHARE, POPULATED_FROM_BYTES, SLICE_BYTES, SPARE_BYTES, Population
from tierkv.memory.shared import SharedMemory
from tierkv.types.engine import EngineSpec, GroupSpec

PAYLOAD = (1 << 20) - 4096
MIB = 1 << 20
SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)


def pages_of(arena: HostArena) -> int:
    """Bytes of the arena that have pages, as the kernel counts them."""
    assert arena._bytes is not None
    start = arena._bytes.ctypes.data
    counted, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(number, 16) for number in first.split("-"))
            is_inside = low < start + len(arena._bytes) and high > start
        elif is_inside and first == "Rss:":
            counted += int(line.split()[1]) << 10
    return counted


def populate(arena: HostArena) -> Population:
    """Populate at once, or skip where the kernel cannot."""
    population = Population(arena, sleep=lambda _s: None, available=lambda: None)
    population.run()
    if not population.populated_bytes:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    return population


@pytest.mark.parametrize("is_shared", [False, True])
def test_all_pages_are_there_afterwards(is_shared: bool) -> None:
    """The first fill of a host tier ran at a tenth of the speed of a copy, in memory of a process or of several."""
    shared = SharedMemory()
    arena = HostArena(20 * MIB, PAYLOAD, shared.map) if is_shared else HostArena(20 * MIB, PAYLOAD)
    before = pages_of(arena)
    population = populate(arena)
    assert population.done
    assert population.populated_bytes == 20 * MIB
    assert pages_of(arena) >= 20 * MIB > before
    arena.close()
    shared.close()


def test_the_content_does_not_change() -> None:
    """Chunks arrive while the arena is populated."""
    arena = HostArena(4 * MIB, PAYLOAD)
    arena.slot(2)[:] = b"\x5a" * arena.slot_bytes
    populate(arena)
    assert bytes(arena.slot(2)) == b"\x5a" * arena.slot_bytes
    assert bytes(arena.slot(1)) == bytes(arena.slot_bytes)


def test_a_kernel_without_the_call_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first writes are then slower, as ever: no reason for a warning, and none to fail."""

    def refuse(_address: int, _length: int, _advice: int) -> int:
        arena_module.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(arena_module, "_madvise", refuse)
    arena = HostArena(20 * MIB, PAYLOAD)
    with caplog.at_level(logging.DEBUG):
        population = Population(arena)
        population.run()
        assert not population.step()
    assert population.done
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "up to 0 of 20971520 bytes (Invalid argument)" in record.getMessage() or "[Errno 22]" in record.getMessage()
    arena.slot(0)[:4] = b"here"


def test_it_ends_before_memory_runs_out() -> None:
    """A host tier that is too large for the machine must not end other programs when the engine starts."""
    left = [SPARE_BYTES + 2 * SLICE_BYTES, SPARE_BYTES + SLICE_BYTES, SPARE_BYTES + SLICE_BYTES - 1]
    population = Population(HostArena(64 * MIB, PAYLOAD), lambda _s: None, available=lambda: left.pop(0))
    population.run()
    assert population.populated_bytes in {2 * SLICE_BYTES, 0}  # 0: this kernel has no such call
    assert population.done


def test_each_slice_is_followed_by_as_long_a_pause() -> None:
    """The engine starts meanwhile, and wants pages and bandwidth as well."""
    ticks = iter(range(100))
    pauses: list[float] = []
    arena = HostArena(3 * SLICE_BYTES, PAYLOAD)
    Population(arena, pauses.append, clock=lambda: next(ticks), available=lambda: None).run()
    assert pauses in ([1, 1], [])


def test_an_arena_may_be_closed_meanwhile() -> None:
    """A stack that fails to open, or a user in a hurry, closes it in the middle of a slice."""
    arena = HostArena(256 * MIB, PAYLOAD)
    population = Population(arena, sleep=lambda _s: None, available=lambda: None)
    thread = threading.Thread(target=population.run)
    thread.start()
    arena.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert population.done
    with pytest.raises(ValueError, match="closed"):
        arena.populate(0, 4096)
    gc.collect()


def test_a_stack_populates_its_arena_and_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine waits until nothing is pending: it must not wait for pages, and a close must end the thread."""
    populated: list[Population] = []
    began, may_go_on = threading.Event(), threading.Event()

    def run(population: Population) -> None:
        populated.append(population)
        began.set()
        may_go_on.wait(60.0)

    monkeypatch.setattr(Population, "run", run)
    with tierkv.open_stack({"host": {"capacity": POPULATED_FROM_BYTES + MIB}}, SPEC) as stack:
        assert began.wait(60.0)
        assert not stack.has_pending_work()
        assert not populated[0].done
    assert populated[0].done
    may_go_on.set()


@pytest.mark.parametrize("host", [{"capacity": POPULATED_FROM_BYTES + MIB, "populate": False}, {"capacity": MIB}])
def test_no_thread_is_started_where_none_is_wanted(host: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small arena is filled in a moment, and some users want memory to be taken as it is needed."""
    monkeypatch.setattr(Population, "run", lambda _self: pytest.fail("populated"))
    with tierkv.open_stack({"host": host}, SPEC):
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv-populate")]


def test_available_memory_is_at_most_all_of_it() -> None:
    """A wrong unit would populate nothing, or everything."""
    available = available_bytes()
    assert available is not None
    assert 16 * MIB < available <= usable_bytes()


def test_it_pauses_in_proportion_to_its_work() -> None:
    """The kernel's work on pages holds up the engine's own: each slice is followed by a pause, but for the last one."""
    arena = HostArena(3 * SLICE_BYTES, PAYLOAD)
    seconds, pauses = itertools.count(), list[float]()
    population = Population(arena, pauses.append, lambda: float(next(seconds)), lambda: None)
    population.run()
    if not population.populated_bytes:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    assert pauses == [float(PAUSE_SHARE)] * 2
    arena.close()
