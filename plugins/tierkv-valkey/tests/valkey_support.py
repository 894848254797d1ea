"""Open tiers and frames for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tierkv_valkey
from tierkv.abc import BackendContext
from tierkv.errors import TierKVError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace
from tierkv_valkey import ValkeyOptions

KIB = 1024
PATIENCE_S = 60.0


def context(model: str = "m") -> BackendContext:
    """Context of a tier."""
    groups = ((16, (4096,), "full_attention", None),)
    namespace = Namespace(
        model=model,
        revision="",
        dtype="bfloat16",
        layout="page",
        groups=groups,
        blocks_per_chunk=4,
        hash_block_tokens=16,
    )
    return BackendContext("remote", namespace, 64 * KIB, None)


CHUNK_NAMES = f"tierkv:{context().namespace.fingerprint().hex()}:*"
"""Pattern of the names of chunks. The description of the namespace is another name."""


def opened(url: str, **options: Any) -> Session:
    """Open a tier."""
    defaults: dict[str, Any] = {"timeout_s": 0.5}
    return Session(tierkv_valkey.PLUGIN, context(), ValkeyOptions(url=url, **{**defaults, **options}))


def frames(count: int, size: int = 4 * KIB, start: int = 0) -> dict[Key, bytes]:
    """Frames by key."""
    return {make_key(number): make_frame(make_key(number), 1, size) for number in range(start, start + count)}


def heals(session: Session, wanted: Mapping[Key, bytes]) -> None:
    """Store and read frames until nothing fails, without a reopen.

    Raises:
        AssertionError: something still fails after a minute.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        errors = [error for error in session.write(wanted) if error is not None]
        if not errors and session.read(list(wanted)) == list(wanted.values()):
            return
        assert time.monotonic() < deadline_s, f"not healed: {errors[:1]}"
        time.sleep(0.05)


@contextmanager
def traffic(work: Callable[[], None], threads: int = 3) -> Iterator[list[int]]:
    """Repeat ``work`` on threads meanwhile. Yields the number of repetitions of each; raises their first exception."""
    stop = threading.Event()
    done = [0] * threads
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            while not stop.is_set():
                work()
                done[number] += 1
        except BaseException as error:  # noqa: BLE001  it is raised on the test's thread
            failures.append(error)

    runners = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(threads)]
    for runner in runners:
        runner.start()
    try:
        yield done
    finally:
        stop.set()
        for runner in runners:
            runner.join(PATIENCE_S)
    if failures:
        raise failures[0]
    assert not any(runner.is_alive() for runner in runners), "a call hangs"


def only_misses(results: Iterable[object], wanted: Iterable[bytes]) -> int:
    """Assert that each result is the wanted frame, a miss or an error. Returns the number of hits."""
    hits = 0
    for result, frame in zip(results, wanted, strict=True):
        assert result is None or isinstance(result, TierKVError) or result == frame, "wrong bytes"
        hits += result == frame
    return hits
