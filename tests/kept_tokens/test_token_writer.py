"""Writer of kept tokens: the engine's thread never waits for it, and what it cannot write is counted."""

from __future__ import annotations

import resource
import signal
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from core_truth import engine_spec
from hand_thread import HandThread

from tierkv.kept_tokens.packing import pack_snapshot
from tierkv.kept_tokens.token_file import TokenFile
from tierkv.kept_tokens.token_writer import TokenWriter
from tierkv.logs.stack_log import StackLog
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key

NAMESPACE = b"n" * 16
GROUP = Geometry.of(engine_spec((16,), 16), blocks=4).groups[0]


def snapshot(*tokens: int) -> Snapshot:
    """Snapshot of a chunk whose tokens repeat these."""
    words = array("q", tokens * (GROUP.chunk_tokens // len(tokens)))
    return Snapshot((b"a", b"b", b"c", b"d"), None, words, None, None, GROUP)


def key(number: int) -> Key:
    """Key of a chunk."""
    return Key(number.to_bytes(4, "big") * 9)


def file_at(path: Path) -> TokenFile:
    """The file."""
    return TokenFile(path, NAMESPACE, 1000, StackLog(time.monotonic))


def writer_of(path: Path, counters: CoreCounters, **options: Any) -> TokenWriter:
    """A writer with a real clock."""
    log = StackLog(time.monotonic)
    return TokenWriter(file_at(path), counters, log, clock=time.monotonic, engine_sleep=time.sleep, **options)


def rows_at(path: Path) -> dict[Key, bytes]:
    """Rows of the file."""
    file = file_at(path)
    try:
        return dict(file.rows())
    finally:
        file.close()


def test_changes_of_many_steps_reach_the_file(tmp_path: Path) -> None:
    """A real thread: kept, kept again, forgotten; after the close the file has what is left."""
    counters = CoreCounters()
    writer = writer_of(tmp_path / "tokens.db", counters)
    for number in range(200):
        writer.keep(key(number), snapshot(number))
        if number % 2:
            writer.forget(key(number - 1))
        writer.hand_over()
    writer.close(30.0)
    writer.close(30.0)
    assert rows_at(tmp_path / "tokens.db") == {key(n): pack_snapshot(snapshot(n)) for n in range(1, 200, 2)}
    assert not counters.tokens_not_kept


def test_a_disk_that_hangs_costs_rows_and_no_time(tmp_path: Path) -> None:
    """The thread never runs: the queue is bounded, what exceeds it is dropped and counted, deletions are not."""
    counters, thread = CoreCounters(), HandThread()
    writer = writer_of(tmp_path / "tokens.db", counters, spawn=thread, changes_max=10)
    for number in range(25):
        writer.keep(key(number), snapshot(number))
        writer.forget(key(1000 + number))
        writer.hand_over()
    assert counters.tokens_not_kept == 20
    assert thread.runner.step()  # it answers again
    writer.keep(key(99), snapshot(99))
    writer.hand_over()
    assert counters.tokens_not_kept == 20
    writer.close(30.0)
    assert sorted(rows_at(tmp_path / "tokens.db")) == [key(n) for n in (0, 1, 2, 3, 4, 99)]


def test_a_full_disk_is_counted_and_heals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files may not grow for a while: the log says so once, the counter grows, and later rows are written."""
    counters, thread = CoreCounters(), HandThread()
    writer = writer_of(tmp_path / "tokens.db", counters, spawn=thread)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        for number in range(3):
            writer.keep(key(number), snapshot(number))
            writer.hand_over()
            assert thread.runner.step()
        writer.hand_over()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert counters.tokens_not_kept == 3
    assert caplog.text.count("tokens_not_kept") == 1
    writer.keep(key(7), snapshot(7))
    writer.close(30.0)
    assert rows_at(tmp_path / "tokens.db") == {key(7): pack_snapshot(snapshot(7))}


def test_a_token_that_does_not_fit_costs_its_own_chunk_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine with strange tokens must not take the rows of other chunks with it."""
    counters, thread = CoreCounters(), HandThread()
    writer = writer_of(tmp_path / "tokens.db", counters, spawn=thread)
    for number, tokens in enumerate((1, -1, 2**40, 2)):
        writer.keep(key(number), snapshot(tokens))
    writer.close(30.0)
    assert sorted(rows_at(tmp_path / "tokens.db")) == [key(0), key(3)]
    assert counters.tokens_not_kept == 2
    assert "tokens_not_kept" in caplog.text
