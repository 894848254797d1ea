"""Backends that break one promise each: ``python -m harness.broken_targets NAME`` prints what the harness finds."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import mmap
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.crash import Calls, Cuts, Kills
from harness.exhaust import CAUSES, Cause, Exhaustion
from harness.lanes import Verdict
from harness.system_calls import ALL_CALLS, SystemCalls, load
from harness.targets import TARGETS, Target
from harness.upkeep import COMMANDS, Upkeep
from tierkv.abc import ReadRequest, ReadResult, StoredFrame, WriteRequest, WriteResult
from tierkv.dispatch.health import write_gate
from tierkv.errors import BackendError
from tierkv.stores import folder
from tierkv.stores.export_sums import ExportSums
from tierkv.testing.frames import aligned_copy

SEEDS = 60
"""Number of plays in which the harness must find the fault."""


class BrokenBackend:
    """Backend whose writes or reads are replaced; the rest is the disk tier's.

    Args:
        backend: the disk tier.
        write: takes the backend and the requests.
        read: takes the backend and the requests.
    """

    def __init__(self, backend: Any, write: Callable[..., Any] | None, read: Callable[..., Any] | None) -> None:
        self.kept: list[WriteRequest] = []
        self.has_failed = False
        self._backend = backend
        self._write = write
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, requests: Sequence[WriteRequest]) -> Any:
        """Store frames, or break a promise."""
        return self._write(self, self._backend, requests) if self._write else self._backend.write(requests)

    def read_into(self, requests: Sequence[ReadRequest]) -> Any:
        """Read frames, or break a promise."""
        return self._read(self._backend, requests) if self._read else self._backend.read_into(requests)


def acknowledge_early(broken: BrokenBackend, backend: Any, requests: Sequence[WriteRequest]) -> list[WriteResult]:
    """Acknowledge frames when they are in memory; the next call stores them."""
    waiting, broken.kept = (
        broken.kept,
        [WriteRequest(request.key, aligned_copy(bytes(request.frame)).toreadonly()) for request in requests],
    )
    backend.write(waiting)
    return [None] * len(requests)


def give_up(broken: BrokenBackend, backend: Any, requests: Sequence[WriteRequest]) -> list[WriteResult]:
    """Refuse every write after the first failure."""
    results = backend.write(requests) if not broken.has_failed else [BackendError("it gave up")] * len(requests)
    broken.has_failed |= any(results)
    return list(results)


def write_by_map(broken: BrokenBackend, backend: Any, requests: Sequence[WriteRequest]) -> list[WriteResult]:
    """Change a byte of a segment through a map, which no call shows."""
    results = list(backend.write(requests))
    path = min(backend.current.directory.glob("segment-*"))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[-1] ^= 1
    return results


def flip_a_bit(backend: Any, requests: Sequence[ReadRequest]) -> list[ReadResult]:
    """Change one bit of each frame that is read."""
    results = list(backend.read_into(requests))
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, int):
            request.buffer[result // 2] ^= 1
    return results


def _target(write: Callable[..., Any] | None = None, read: Callable[..., Any] | None = None) -> Target:
    good = TARGETS["disk"]
    plugin = dataclasses.replace(
        good.plugin, open=lambda context, options: BrokenBackend(good.plugin.open(context, options), write, read)
    )
    return dataclasses.replace(good, plugin=plugin)


@contextlib.contextmanager
def _for_ever(_place: Path, calls: SystemCalls) -> Iterator[None]:
    """Let every call fail, and never end that."""
    calls.refuse(ALL_CALLS, errno.EIO)
    yield


@contextlib.contextmanager
def _unsaid(place: Path, calls: SystemCalls) -> Iterator[None]:
    """Take all room from a tier whose health does not look at room."""
    before, write_gate.NO_ROOM_S = write_gate.NO_ROOM_S, math.inf
    with CAUSES["quota"].lasting(place, calls):
        yield
    write_gate.NO_ROOM_S = before


def _upkeep(command: str, place: Path, calls: SystemCalls) -> Callable[[int], Verdict]:
    """Play one command of the mode ``upkeep``."""
    names, upkeep = list(COMMANDS), Upkeep("disk", place, calls)
    return lambda seed: upkeep.play(names.index(command) + len(names) * seed)


def _write_in_place(path: Path, data: memoryview) -> None:
    """Write a file of an export under its final name, in two parts."""
    with path.open("wb", buffering=0) as file:
        file.write(data[:100])
        file.write(data[100:])


def torn_export(place: Path, calls: SystemCalls) -> Callable[[int], Verdict]:
    """Copies to a folder whose files are not renamed when they are whole."""
    folder._publish = _write_in_place
    return _upkeep("copy out", place, calls)


def late_manifest(place: Path, calls: SystemCalls) -> Callable[[int], Verdict]:
    """Removals from an export whose manifest has them only afterwards."""
    take_out = ExportSums.take_out
    batches: list[Sequence[StoredFrame]] = []

    def after(sums: ExportSums, _failed: Sequence[StoredFrame]) -> None:
        take_out(sums, batches.pop())

    ExportSums.take_out = lambda _sums, frames: batches.append(frames)  # type: ignore[assignment,method-assign]
    ExportSums.put_back = after  # type: ignore[assignment,method-assign]
    return _upkeep("rm export", place, calls)


def plays(place: Path, calls: SystemCalls) -> dict[str, Callable[[], Callable[[int], Verdict]]]:
    """Each broken promise by name."""
    return {
        "torn-export": lambda: torn_export(place, calls),
        "late-manifest": lambda: late_manifest(place, calls),
        "early": lambda: Kills(_target(write=acknowledge_early), place).play,
        "wrong": lambda: Kills(_target(read=flip_a_bit), place).play,
        "sulking": lambda: Calls(_target(write=give_up), place, calls).play,
        "unforced": lambda: Cuts(TARGETS["disk"], place, calls, syncs_lie=True).play,
        "never-ends": lambda: Exhaustion("disk", Cause("it stays dead", _for_ever), place, calls).play,
        "silent": lambda: Exhaustion("disk", Cause("it has no room, and is silent", _unsaid), place, calls).play,
        "unseen": lambda: Cuts(_target(write=write_by_map), place, calls).play,
        "unforced-lmdb": lambda: Cuts(TARGETS["lmdb"], place, calls, syncs_lie=True).play,
    }


def main(name: str) -> None:
    """Print the first finding, or the reason why there can be none here."""
    calls = load()
    logging.disable()
    if isinstance(calls, str):
        sys.stdout.write(f"skipped: {calls}\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        play = plays(Path(directory) / "place", calls)[name]()
        found = next((verdict.broken for seed in range(SEEDS) if (verdict := play(seed)).broken), "nothing")
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(sys.argv[1])
