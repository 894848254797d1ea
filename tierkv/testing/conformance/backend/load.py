"""Kit, part 3: many threads at once, and a full tier."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tierkv.errors import OutOfSpaceError
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import frame_version, make_frame, make_key
from tierkv.types.keys import Key

ROUNDS = 30
THREADS_MAX = 4


class ConcurrencyTests(KitBase):
    """As many calls at once as the backend declares to prefer (at most four)."""

    @property
    def threads(self) -> int:
        """Number of calls at once."""
        return max(2, min(self.capabilities.preferred_concurrency, THREADS_MAX))

    def test_distinct_keys_at_once(self, session: Session) -> None:
        """Threads that write, read and delete keys of their own never read each other's bytes."""

        def work(thread: int) -> None:
            keys = [make_key(100 * thread + number) for number in range(3)]
            for version in range(ROUNDS):
                size = self.sizes[version % len(self.sizes)]
                frames = {key: make_frame(key, version, size) for key in keys}
                session.put(frames)
                assert session.read(keys) == list(frames.values())
                session.forget(keys[:1])
                assert session.get(keys[0]) is None

        run_at_once([partial(work, thread) for thread in range(self.threads)])

    def test_readers_see_old_or_new_but_whole(self, session: Session) -> None:
        """While a key is overwritten and deleted, a reader gets one of its frames, intact, or a miss."""
        self.need_two_calls_at_once()
        keys = [make_key(number) for number in range(3)]
        done = threading.Event()

        def size_of(version: int) -> int:
            return self.sizes[version % len(self.sizes)]

        def write() -> None:
            rng = random.Random(1)
            try:
                for version in range(1, 4 * ROUNDS):
                    session.put({key: make_frame(key, version, size_of(version)) for key in keys})
                    if rng.random() < 0.3:
                        session.forget([rng.choice(keys)])
            finally:
                done.set()

        def read() -> None:
            newest = dict.fromkeys(keys, 0)
            while not done.is_set():
                for key, frame in zip(keys, session.read(keys), strict=True):
                    if isinstance(frame, bytes) and len(frame) >= 8:
                        version = frame_version(frame)
                        assert frame == make_frame(key, version, size_of(version)), "torn or foreign frame"
                        assert version >= newest[key], "an older frame came back"
                        newest[key] = version
                    else:
                        assert frame is None or isinstance(frame, bytes), f"read failed: {frame!r}"

        run_at_once([write, *[read] * (self.threads - 1)])

    def test_writers_of_one_key_at_once(self, session: Session) -> None:
        """Two stores of one chunk may overlap; one of the frames is stored, intact."""
        key, size = make_key(1), self.sizes[-1]

        def write(thread: int, number: int) -> None:
            session.put({key: make_frame(key, 1000 * thread + number, size)})

        for number in range(ROUNDS):
            run_at_once([partial(write, thread, number) for thread in range(self.threads)])
            written = [make_frame(key, 1000 * thread + number, size) for thread in range(self.threads)]
            assert session.get(key) in written, "neither of the two frames, but a mixture or an older one"
        if self.capabilities.scan:
            assert session.scan() == {key: size}

    def need_two_calls_at_once(self) -> None:
        """Skip if the framework never makes two calls at once."""
        if self.capabilities.preferred_concurrency == 1:
            self.not_applicable("declares preferred_concurrency = 1")


class CapacityTests(KitBase):
    """Only for backends that declare ``bounded``."""

    def test_full_keeps_what_is_there(self, place: Path) -> None:
        """Beyond its capacity a backend refuses key by key with OutOfSpaceError, or grows; it loses no frame.

        What it holds stays whole, and a delete makes room again, now and after a reopen.
        """
        self.need("bounded")
        size = self.frame_bytes_max
        frames_max = self.full_capacity_bytes // size
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            stored = self.fill(session, 3 * frames_max)
            assert len(stored) >= frames_max // 2, f"refused after {len(stored)} of {frames_max} frames"
            for key in stored:
                assert session.get(key) == make_frame(key, 1, size)
            session.forget(stored[:4])
            late = [make_key(number) for number in range(4)]
            assert None in session.write({key: make_frame(key, 1, size) for key in late}), "a delete made no room"
            session.forget(late)
        if self.capabilities.durable:
            with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
                for key in stored[4:]:
                    assert session.get(key) == make_frame(key, 1, size)
                session.forget(stored[4:])
                assert len(self.fill(session, frames_max // 2)) == frames_max // 2

    def test_churn_within_capacity_is_never_refused(self, place: Path) -> None:
        """A framework that uses half of the capacity may write for ever.

        Deletes and overwrites give their room back, also across a reopen.
        """
        self.need("bounded")
        size = self.frame_bytes_max
        resident_max = self.full_capacity_bytes // size // 2
        resident: list[Key] = []
        number = 0
        for _ in range(2 if self.capabilities.durable else 1):
            with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
                for _ in range(4 * resident_max):
                    if len(resident) == resident_max:
                        session.forget([resident.pop(0)])
                    key = make_key(number)
                    session.put({key: make_frame(key, 1, size)})
                    resident.append(key)
                    number += 1
                for version in range(2, 10):
                    session.put({resident[-1]: make_frame(resident[-1], version, size)})
                session.put({resident[-1]: make_frame(resident[-1], 1, size)})
                for key in resident:
                    assert session.get(key) == make_frame(key, 1, size)
        if not self.capabilities.durable:
            return
        with self.open(place, capacity_bytes=self.full_capacity_bytes) as session:
            assert session.read(resident) == [make_frame(key, 1, size) for key in resident]

    def fill(self, session: Session, count: int) -> list[Key]:
        """Write ``count`` frames or until the first refusal. Returns the stored keys."""
        stored: list[Key] = []
        for number in range(1000, 1000 + count):
            key = make_key(number)
            (result,) = session.write({key: make_frame(key, 1, self.frame_bytes_max)})
            if result is not None:
                assert isinstance(result, OutOfSpaceError), f"a full tier says OutOfSpaceError, not {result!r}"
                assert session.get(key) is None, "refused, yet there"
                break
            stored.append(key)
        return stored


def run_at_once(jobs: list[Callable[[], None]]) -> None:
    """Start all jobs together, each on its own thread; raise the first failure."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], None]) -> None:
        barrier.wait()
        job()

    with ThreadPoolExecutor(len(jobs), thread_name_prefix="conformance") as pool:
        for future in [pool.submit(start, job) for job in jobs]:
            future.result()
