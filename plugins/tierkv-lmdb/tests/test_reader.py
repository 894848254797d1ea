"""Processes that read beside the writer, and see frames stored after they opened."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, killed_at_end, namespace, open_at, put

import tierkv_lmdb
from tierkv.config.loading import parse_config
from tierkv.config.resolving import resolve
from tierkv.errors import BackendError, ConfigError, NamespaceMismatchError, TierKVError
from tierkv.plugins.loading import load_plugins
from tierkv_lmdb import LmdbReaderOptions


def open_reader(place: Path, model: str = "tests") -> Any:
    """Open a reader at ``place`` through the plugin."""
    return tierkv_lmdb.READ_ONLY_PLUGIN.open(context(None, model=model), LmdbReaderOptions(path=str(place)))


WRITER = """
import pathlib, sys, lmdb_support as s
from tierkv_lmdb import options
if sys.argv[2] != "-":
    options.MAP_BYTES_AT_OPEN = int(sys.argv[2])
backend = None
print("ready", flush=True)
for line in sys.stdin:
    verb, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if verb == "open":
        backend = s.open_at(pathlib.Path(sys.argv[1]), s.context(256 * s.MIB, 4 * s.MIB), durability="none")
    elif verb == "put":
        assert s.put(backend, {s.key(numbers[0]): bytes([numbers[0]]) * numbers[1]}) == [None]
    elif verb == "delete":
        backend.delete([s.key(numbers[0])])
    elif verb == "close":
        backend.close()
    print("done", flush=True)
"""


@contextmanager
def writer(place: Path, map_bytes: object = "-") -> Iterator[Any]:
    """Process that executes orders, one at a time."""
    command = [sys.executable, "-c", WRITER, str(place), str(map_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=Path(__file__).parent, text=True, **pipes) as child:  # type: ignore[call-overload]  # ty of ** is lost
        assert child.stdout.readline() == "ready\n"

        def order(*words: object) -> None:
            child.stdin.write(" ".join(map(str, words)) + "\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n", f"the writer did not {words}"

        try:
            yield order
        finally:
            child.kill()


def test_reader_sees_what_is_stored_after_it_opened(tmp_path: Path) -> None:
    """The purpose of readers: one engine fills the tier, and others on the machine benefit at once."""
    reader = open_reader(tmp_path)
    assert reader.contains([key(1)]) == [False]
    assert get(reader, key(1)) == [None]
    with writer(tmp_path) as order:
        order("open")
        assert reader.contains([key(1)]) == [False]
        order("put", 1, 60 * KIB)
        order("put", 2, 100)
        assert reader.contains([key(1), key(2), key(3)]) == [True, True, False]
        assert get(reader, key(1), key(2)) == [b"\x01" * 60 * KIB, b"\x02" * 100]
        order("put", 3, 60 * KIB)
        assert get(reader, key(3)) == [b"\x03" * 60 * KIB]
        order("delete", 1)
        assert get(reader, key(1)) == [None]
    assert get(reader, key(3)) == [b"\x03" * 60 * KIB], "the chunks outlive the writer"
    reader.close()


def test_reader_follows_when_the_writer_fills_more_than_its_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader's map has the size of the file at open: pages beyond it are an LMDB error until the map grows."""
    monkeypatch.setattr("tierkv_lmdb.reader.MAP_BYTES_MIN", MIB)
    with writer(tmp_path, MIB) as order:
        order("open")
        order("put", 1, 1000)
        reader = open_reader(tmp_path)
        assert get(reader, key(1)) == [b"\x01" * 1000]
        before = reader._current().map_bytes
        for number in range(2, 20):
            order("put", number, 4 * MIB - 16)
        assert get(reader, key(1), key(19), buffer_bytes=4 * MIB) == [b"\x01" * 1000, b"\x13" * (4 * MIB - 16)]
        assert reader._current().map_bytes > before
        reader.close()


def test_readers_race_the_writer(tmp_path: Path) -> None:
    """Chunks are replaced and deleted during reads: each result is a whole frame of that key, or a miss."""
    with writer(tmp_path) as order:
        order("open")
        reader = open_reader(tmp_path)
        wrong: list[object] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                for number, got in enumerate(get(reader, *(key(n) for n in range(4)), buffer_bytes=200 * KIB)):
                    if got is not None and (not isinstance(got, bytes) or got != bytes([number]) * len(got)):
                        wrong.append(got)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(200):
            order("put", step % 4, 60 * KIB + step * 500)
            if step % 3 == 0:
                order("delete", (step + 1) % 4)
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        reader.close()


@pytest.mark.parametrize("asked_meanwhile", [True, False])
def test_reader_follows_a_new_data_file(tmp_path: Path, *, asked_meanwhile: bool) -> None:
    """A user who empties the tier removes its directory: the reader then has a file without a name open."""
    reader = open_reader(tmp_path)
    with writer(tmp_path) as order:
        order("open")
        order("put", 1, 1000)
        assert reader.contains([key(1)]) == [True]
        order("close")
    shutil.rmtree(directory(tmp_path))
    if asked_meanwhile:
        assert reader.contains([key(1)]) == [False]
    with writer(tmp_path) as order:
        order("open")
        order("put", 2, 1000)
        assert reader.contains([key(1), key(2)]) == [False, True]
    reader.close()


READ_FOR_EVER = """
import pathlib, sys, lmdb_support as s, tierkv_lmdb
reader = tierkv_lmdb.READ_ONLY_PLUGIN.open(s.context(None), tierkv_lmdb.LmdbReaderOptions(path=sys.argv[1]))
assert s.get(reader, s.key(1)) == [b"x" * 60 * s.KIB]
print("ready", flush=True)
while True:
    for _ in range(1000):
        s.get(reader, s.key(1))
"""


def test_readers_do_not_prevent_reuse_of_pages(tmp_path: Path) -> None:
    """Each read is a transaction of its own; the slot of a reader killed within one is cleared."""
    backend = open_at(tmp_path, context(4 * MIB), durability="none")
    put(backend, {key(1): b"x" * 60 * KIB})
    for _ in range(3):
        with killed_at_end(READ_FOR_EVER, tmp_path):
            for number in range(200):
                assert put(backend, {key(2 + number % 8): bytes(60 * KIB)}) == [None]
    for number in range(200):
        assert put(backend, {key(2 + number % 8): bytes(60 * KIB)}) == [None]
    assert (directory(tmp_path) / "data.mdb").stat().st_size <= 4 * MIB
    backend.close()


def test_reader_changes_nothing(tmp_path: Path) -> None:
    """A reader refuses to write, and creates no file in a directory without a writer."""
    place = tmp_path / "not" / "there"
    reader = open_reader(place)
    assert not place.parent.exists()
    for result in [*put(reader, {key(1): b"frame"}), *reader.delete([key(1)])]:
        assert isinstance(result, BackendError)
        assert "reading only" in str(result)
    reader.close()
    with pytest.raises(BackendError, match="closed"):
        reader.contains([key(1)])


def test_reader_reads_no_other_namespace(tmp_path: Path) -> None:
    """A directory renamed or copied by hand must not serve its bytes to another model."""
    with writer(tmp_path) as order:
        order("open")
        order("put", 1, 1000)
    directory(tmp_path).rename(tmp_path / namespace("other").fingerprint().hex())
    with pytest.raises(NamespaceMismatchError):
        open_reader(tmp_path, model="other")


def test_reader_of_a_wrong_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A typing error in the path is logged; a path with other files is refused."""
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("x")
    with pytest.raises(NamespaceMismatchError, match=r"thesis.txt"):
        open_reader(tmp_path / "documents")
    with pytest.raises(TierKVError, match=r"documents/thesis.txt"):
        open_reader(tmp_path / "documents" / "thesis.txt")
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        open_reader(tmp_path / "typing-error").close()
    assert "typing-error" in caplog.text


def test_reader_ignores_data_of_a_crashed_machine(tmp_path: Path) -> None:
    """Unsynced data may crash a reader; the next writer drops it, and until then it counts as absent."""
    with writer(tmp_path) as order:
        order("open")
        order("put", 1, 1000)
    reader = open_reader(tmp_path)
    assert reader.contains([key(1)]) == [True]
    reader.close()
    (directory(tmp_path) / "unsynced").write_text("00000000-0000-0000-0000-000000000000")
    reader = open_reader(tmp_path)
    assert reader.contains([key(1)]) == [False]
    reader.close()


def test_data_that_cannot_be_read_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A writer that is just starting, or damaged data: the stack starts, and each call reports the error.

    The breaker therefore finds the tier healthy as soon as it can be read.
    """
    with writer(tmp_path) as order:
        order("open")
        order("put", 1, 1000)
        order("close")
    data = directory(tmp_path) / "data.mdb"
    good = data.read_bytes()
    data.write_bytes(b"\x00" * 8192)
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        reader = open_reader(tmp_path)
    assert str(tmp_path) in caplog.text
    with pytest.raises(BackendError, match=str(tmp_path)):
        reader.contains([key(1)])
    with pytest.raises(BackendError, match=str(tmp_path)):
        get(reader, key(1))
    data.write_bytes(good)
    assert get(reader, key(1)) == [b"\x01" * 1000]
    reader.close()


def test_configuration_requires_read_only() -> None:
    """The capabilities are shared and read_only, so the stack checks presence and never writes."""
    tier = {"backend": "lmdb-read-only", "path": "/x"}
    with pytest.raises(ConfigError, match="read_only"):
        resolve(parse_config({"host": {"capacity": "1MiB"}, "tiers": [tier]}), load_plugins())
    resolve(parse_config({"host": {"capacity": "1MiB"}, "tiers": [{**tier, "write": "read_only"}]}), load_plugins())


def test_check_of_a_reader(tmp_path: Path) -> None:
    """Before the first start: the path, the permission to read, and the writer."""
    check = tierkv_lmdb.READ_ONLY_PLUGIN.check
    assert check is not None

    def check_results(path: Path) -> dict[str, Any]:
        return {check_result.subject: check_result for check_result in check(LmdbReaderOptions(path=str(path)), None)}

    assert not check_results(tmp_path / "missing")["path"].ok
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("x")
    assert "thesis.txt" in check_results(tmp_path / "documents")["path"].detail
    backend = open_at(tmp_path / "tier")
    found = check_results(tmp_path / "tier")
    assert found["path"].ok
    assert f"process {os.getpid()}" in found["lock"].detail
    backend.close()
    assert "lock" not in check_results(tmp_path / "tier")
