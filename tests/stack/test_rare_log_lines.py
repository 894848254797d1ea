"""Lines about rarer events, each from a real stack in which the event happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack_bed import Faults

from tierkv import open_stack
from tierkv.hookspecs import hookimpl
from tierkv.logs.stack_log import LOGGER
from tierkv.plugins.loading import load_plugins
from tierkv.stack.core import StackCore
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, HandRequest, Prompt, engine_spec
from tierkv.testing.faults import slow


@contextmanager
def engine_of(plugins: Any = None, **config: Any) -> Iterator[HandEngine]:
    """An engine over a small host tier, and what else is configured."""
    whole = {"host": {"capacity": 12 * SLOT_BYTES}, "lookup": {"recompute": "off"}, **config}
    with open_stack(whole, engine_spec(), plugins=plugins) as stack:
        yield HandEngine(stack)


def line(caplog: pytest.LogCaptureFixture, event: str) -> logging.LogRecord:
    """The first line about an event."""
    return next(
        record
        for record in caplog.records
        if record.name == LOGGER and record.event == event  # type: ignore[attr-defined]
    )


def look(engine: HandEngine) -> None:
    """Report the counters now, not at the end of the second."""
    core: StackCore = engine.stack._core
    core.watch.look()


def test_a_host_tier_without_room(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that is longer than the slots that others leave free is not stored, and the line says so."""
    with engine_of() as engine:
        engine.store(Prompt(1, 9))
        held = engine.arrive(Prompt(1, 9))
        assert engine.lookup(held) == 9
        engine.store(Prompt(2, 8))
        look(engine)
        engine.end(held)
    assert line(caplog, "host_full").batches >= 1  # type: ignore[attr-defined]


def test_writes_that_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tier that is slower than the stores: the number of chunks that it does not get."""
    faults = Faults()
    disk = {"name": "disk", "backend": "faulty", "path": str(tmp_path), "capacity": "4MiB", "min_free_bytes": 0}
    tier = {**disk, "queue_bytes_max": 2 * SLOT_BYTES, "io_threads": 1}
    with engine_of(faults.registry(), tiers=[tier]) as engine:
        faults.last.add("write", slow(0.2), times=3)
        for number in range(6):
            engine.store(Prompt(number))
        look(engine)
    found = line(caplog, "writes_dropped")
    assert (found.tier, found.chunks >= 1) == ("disk", True)  # type: ignore[attr-defined]


def test_a_policy_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin's policy raises: the tier goes on, and the line names it."""
    lru = load_plugins().policies["lru"].plugin

    class Broken:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def touch(self, handles: Sequence[int]) -> None:
            raise ZeroDivisionError

        def __len__(self) -> int:
            return len(self.inner)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Plugin:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_policies(self) -> list[Any]:
            return [replace(lru, name="broken", open=lambda count: Broken(lru.open(count)))]

    with engine_of(load_plugins([Plugin()]), host={"capacity": 12 * SLOT_BYTES, "policy": "broken"}) as engine:
        engine.store(Prompt(1))
        assert engine.load(Prompt(1)) == 4
        look(engine)
    assert line(caplog, "policy_failed").tier == "host"  # type: ignore[attr-defined]


def test_a_hint_that_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A mistake of a client is named, so that it can be mended there."""
    with engine_of() as engine:
        engine.stack.on_new_request(HandRequest("r", Prompt(1), {"tierkv": {"ttl_s": "soon"}}))
    assert "ttl_s" in line(caplog, "hint_ignored").reason  # type: ignore[attr-defined]


def test_a_chunk_that_is_damaged_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Faulty memory: the chunk is refused on its way to the GPU, and the line has its key."""
    with engine_of() as engine:
        engine.store(Prompt(1))
        arena = engine.stack._core.wiring.arena
        for slot in range(arena.num_slots):
            arena.payload(slot)[100] ^= 1
        assert engine.load(Prompt(1)) == 0
    assert line(caplog, "chunk_refused").key in {key.hex() for key in Prompt(1).keys}  # type: ignore[attr-defined]


def test_a_record_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of the record vanishes when a new file is begun: the stack serves, and the line has the path."""
    path = tmp_path / "folder" / "run.jsonl"
    path.parent.mkdir()
    with engine_of(record={"path": str(path), "bytes_max": 65_536, "keep": 0}) as engine:
        path.unlink()
        path.parent.rmdir()
        for number in range(400):
            engine.store(Prompt(number, 8))
            if any(getattr(record, "event", "") == "record_not_written" for record in caplog.records):
                break
    assert line(caplog, "record_not_written").path == path  # type: ignore[attr-defined]
