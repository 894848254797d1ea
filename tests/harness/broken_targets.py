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
from tierkv.abc import ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.dispatch.health import write_gate
from tierkv.errors import BackendError
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
    path = min(backend._directory.glob("segment-*"))
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


def plays(place: Path, calls: SystemCalls) -> dict[str, Callable[[int], Verdict]]:
    """Each broken promise by name."""
    return {
        "early": Kills(_target(write=acknowledge_early), place).play,
        "wrong": Kills(_target(read=flip_a_bit), place).play,
        "sulking": Calls(_target(write=give_up), place, calls).play,
        "unforced": Cuts(TARGETS["disk"], place, calls, syncs_lie=True).play,
        "never-ends": Exhaustion("disk", Cause("it stays dead", _for_ever), place, calls).play,
        "silent": Exhaustion("disk", Cause("it has no room, and is silent", _unsaid), place, calls).play,
        "unseen": Cuts(_target(write=write_by_map), place, calls).play,
        "unforced-lmdb": Cuts(TARGETS["lmdb"], place, calls, syncs_lie=True).play,
    }


def main(name: str) -> None:
    """Print the first finding, or the reason why there can be none here."""
    calls = load()
    logging.disable()
    if isinstance(calls, str):
        sys.stdout.write(f"skipped: {calls}\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        play = plays(Path(folder) / "place", calls)[name]
        found = next((verdict.broken for seed in range(SEEDS) if (verdict := play(seed)).broken), "nothing")
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main(sys.argv[1])
