"""Records on disk: bounded, rotated, and readable after any end of the writing process."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hand_thread import HandThread

from tierkv.errors import ConfigError
from tierkv.recording import reading
from tierkv.recording.entries import Entry
from tierkv.recording.reading import files_of, follow_entries, read_entries
from tierkv.recording.writer import RecordWriter, line_of
from tierkv.types.keys import make_key

HEAD: Entry = {"is": "record", "step": 0, "t": 0, "tiers": ["host"], "model": "m", "pid": 1, "opened": "now"}


def writer_of(path: Path, *, bytes_max: int = 1 << 20, keep: int = 1, **options: Any) -> RecordWriter:
    """A writer with a real clock."""
    return RecordWriter(path, HEAD, bytes_max, keep, clock=time.monotonic, engine_sleep=time.sleep, **options)


def line(number: int) -> Entry:
    """A small entry."""
    return {"is": "reset", "step": number, "t": 0.5}


def steps_in(entries: Iterator[Entry]) -> list[int]:
    """The numbers of all small entries."""
    return [entry["step"] for entry in entries if entry["is"] == "reset"]


def test_what_was_put_is_read(tmp_path: Path) -> None:
    """Entries pass from one thread through another to a file and back, with shortened keys."""
    writer = writer_of(tmp_path / "run.jsonl")
    key = make_key(bytes(range(32)), 3)
    writer.put([line(1), {"is": "chunks", "step": 1, "t": 1.0, "tier": "host", "event": "stored", "keys": [key]}])
    writer.put([line(2)])
    writer.close(10)
    entries = list(read_entries(tmp_path / "run.jsonl"))
    assert entries[0] == HEAD
    assert entries[2]["keys"] == [bytes(range(16)).hex() + ".3"]
    assert steps_in(iter(entries)) == [1, 2]
    assert writer.dropped == 0


def test_a_record_is_private(tmp_path: Path) -> None:
    """It names requests and tenants. Other users of the machine read neither the file in use nor the older ones."""
    before = os.umask(0)
    try:
        writer = writer_of(tmp_path / "run.jsonl", bytes_max=200)
        for step in range(20):
            writer.put([line(step)])
        writer.close(10)
    finally:
        os.umask(before)
    files = list(tmp_path.iterdir())
    assert len(files) > 1
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_files_are_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    """Promise 6: a server runs for months; the bytes on disk stay below (keep + 1) files, and the latest entries are
    kept.
    """
    path = tmp_path / "run.jsonl"
    writer = writer_of(path, bytes_max=1000, keep=2)
    for number in range(300):
        writer.put([line(number)])
    writer.close(10)
    files = files_of(path)
    assert [file.name for file in files] == ["run.jsonl.2", "run.jsonl.1", "run.jsonl"]
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = steps_in(read_entries(path))
    assert kept == list(range(kept[0], 300))
    assert len(kept) > 30
    assert all(json.loads(file.read_text().partition("\n")[0]) == HEAD for file in files)


def test_without_older_files(tmp_path: Path) -> None:
    """Keep = 0 is one file and never two."""
    path = tmp_path / "run.jsonl"
    writer = writer_of(path, bytes_max=500, keep=0)
    for number in range(100):
        writer.put([line(number)])
    writer.close(10)
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]
    assert steps_in(read_entries(path))[-1] == 99


def test_a_slow_disk_costs_entries_and_the_record_says_so(tmp_path: Path) -> None:
    """Promise 2: the engine's thread never waits; entries beyond the bound are counted, in the record, too."""
    path = tmp_path / "run.jsonl"
    thread = HandThread()
    writer = writer_of(path, entries_max=10, spawn=thread)
    writer.put([line(number) for number in range(8)])
    writer.put([line(number) for number in range(8, 13)])
    assert writer.dropped == 5
    thread.runner.step()
    writer.put([line(13)])
    writer.close(10)
    entries = list(read_entries(path))
    assert steps_in(iter(entries)) == [*range(8), 13]
    (lost,) = [entry for entry in entries if entry["is"] == "lost"]
    assert (lost["entries"], lost["step"]) == (5, 13)


def test_a_failing_disk_costs_entries_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Promise 3: the folder disappears and returns: one warning, a count, and the record continues."""
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "run.jsonl"
    thread = HandThread()
    writer = writer_of(path, bytes_max=300, spawn=thread)
    path.unlink()
    folder.rmdir()
    for number in range(6):
        writer.put([line(number)] * 3)
        thread.runner.step()
    writer.put([line(6)])
    assert writer.dropped >= 6
    assert len([record for record in caplog.records if "the record cannot be written" in record.message]) == 1
    folder.mkdir()
    thread.runner.step()
    writer.close(10)
    assert steps_in(read_entries(path)) == [6]


def test_a_disk_that_fills_up_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """The kernel writes the part that fits and reports it only by a number. Those entries are lost and must be counted,
    and later ones must not be appended to the incomplete line.
    """
    path = tmp_path / "run.jsonl"
    thread = HandThread()
    writer = writer_of(path, spawn=thread)
    writer.put([line(0)])
    thread.runner.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        writer.put([line(1)])
        thread.runner.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.put([line(2)])
    writer.close(10)
    assert steps_in(read_entries(path)) == [0, 2]
    assert writer.dropped == 1


def test_a_path_that_cannot_be_opened_is_the_users_error(tmp_path: Path) -> None:
    """Raised when the stack is opened, with the key to change, not when the record is needed."""
    with pytest.raises(ConfigError, match=r"record\.path = .*nowhere.*folder that exists"):
        writer_of(tmp_path / "nowhere" / "run.jsonl")


def test_a_cut_line_is_skipped_and_the_next_process_goes_on(tmp_path: Path) -> None:
    """Kill -9 in the middle of a line costs that line."""
    path = tmp_path / "run.jsonl"
    writer = writer_of(path)
    writer.put([line(1), line(2)])
    writer.close(10)
    path.write_bytes(path.read_bytes()[:-7])
    assert steps_in(read_entries(path)) == [1]
    again = writer_of(path)
    again.put([line(3)])
    again.close(10)
    assert steps_in(read_entries(path)) == [1, 3]
    assert [entry["is"] for entry in read_entries(path)].count("record") == 2


def test_reading_beside_a_writer_sees_whole_lines_only(tmp_path: Path) -> None:
    """`tierkv explain` may run while the server runs."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"is":"reset","step":1,"t":0}\n{"is":"reset","st')
    assert steps_in(read_entries(path)) == [1]


def test_a_missing_record_is_an_error(tmp_path: Path) -> None:
    """The error names the setting that has the path."""
    with pytest.raises(ConfigError, match=r"no such record.*record\.path"):
        list(read_entries(tmp_path / "run.jsonl"))


class Over(Exception):  # noqa: N818 - it ends a test, nothing failed
    """The reader has slept often enough."""


def followed(path: Path, actions: list[Callable[[], object]]) -> list[int]:
    """Entries that a following reader receives; each time it sleeps, the next of the given actions runs."""
    seen: list[int] = []

    def engine_sleep(_: float) -> None:
        if not actions:
            raise Over
        actions.pop(0)()

    def read_on() -> None:
        for entry in follow_entries(path, engine_sleep):
            if entry["is"] == "reset":
                seen.append(entry["step"])

    with pytest.raises(Over):
        read_on()
    return seen


@pytest.mark.parametrize("at_once", [1, 2, 20])
def test_following_goes_on_in_the_next_files(tmp_path: Path, at_once: int) -> None:
    """No entry is lost between two files, even if several files were begun while the reader slept."""
    path = tmp_path / "run.jsonl"
    thread = HandThread()
    writer = writer_of(path, bytes_max=400, keep=20, spawn=thread)

    def write(first: int) -> Callable[[], None]:
        def action() -> None:
            for number in range(first, first + at_once):
                writer.put([line(number)])
                thread.runner.step()

        return action

    seen = followed(path, [write(first) for first in range(0, 40, at_once)])
    writer.close(10)
    assert seen == list(range(40))
    assert len(files_of(path)) > 3


def test_following_reads_a_file_to_its_end_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer may write and rotate between the reader's look at the lines and its look at the files."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(line_of(line(1)))
    original, looks = reading._files_behind, iter(range(100))

    def looked(*arguments: Any) -> list[Path]:
        if next(looks) == 2:
            with path.open("ab") as file:
                file.write(line_of(line(2)))
            path.rename(tmp_path / "run.jsonl.1")
            path.write_bytes(line_of(line(3)))
        return original(*arguments)

    monkeypatch.setattr(reading, "_files_behind", looked)
    assert followed(path, [lambda: None]) == [1, 2, 3]


def test_following_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    """A line that is incomplete when the reader looks is read when it is complete."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(line_of(line(1))[:12])

    def complete() -> None:
        path.write_bytes(line_of(line(1)))

    assert followed(path, [lambda: None, complete]) == [1]


def test_following_survives_a_record_that_vanishes(tmp_path: Path) -> None:
    """A user deletes the record while it is followed; the next record is followed."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(line_of(line(1)))
    assert followed(path, [path.unlink, lambda: path.write_bytes(line_of(line(2))), lambda: None]) == [1, 2]


def test_putting_never_waits(tmp_path: Path) -> None:
    """The thread hangs in a write; the engine's call returns at once."""

    class Hung(HandThread):
        def is_alive(self) -> bool:
            return True

    hung = Hung()
    writer = writer_of(tmp_path / "run.jsonl", entries_max=100, spawn=hung)
    finished: list[bool] = []

    def engine() -> None:
        for number in range(1000):
            writer.put([line(number)])
        finished.append(True)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(30)
    assert finished
    assert writer.dropped == 900
    writer.close(0.05)
    hung.runner.run()  # it wakes up after the close
    assert hung.runner.done
