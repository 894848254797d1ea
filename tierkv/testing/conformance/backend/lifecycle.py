"""Kit: open and close, the threads in between, and the options of a backend in a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from tierkv.abc import CheckResult
from tierkv.config.options import make_options
from tierkv.errors import TierKVError
from tierkv.testing.conformance.kit import KIB, KitBase
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

T = TypeVar("T")
CYCLES = 6
SETTLE_ATTEMPTS = 60
_INTO_A_CALL_S = 0.005
"""Seconds after the end of readers' first calls, which end together: by then they are in further ones."""


class LifecycleTests(KitBase):
    """Life of a backend, from the configuration to the last close."""

    def test_close_twice(self, place: Path) -> None:
        """Shutdown runs on error paths too; the second close must not raise over the first error."""
        session = self.open(place)
        session.close_backend()
        session.close()

    def test_every_call_on_another_thread(self, place: Path) -> None:
        """A stack opens on one thread, scans on a second, calls verbs on others and closes on one more."""
        self.need()
        key, size = make_key(1), self.small
        frame = make_frame(key, 1, size)
        with ExitStack() as threads:  # all of them live to the end, so that no two are one

            def elsewhere(action: Callable[[], T]) -> T:
                pool = threads.enter_context(ThreadPoolExecutor(1, thread_name_prefix="conformance"))
                return pool.submit(action).result()

            session = elsewhere(lambda: self.open(place))
            try:
                if self.capabilities.scan:
                    assert elsewhere(session.scan) == {}
                elsewhere(lambda: session.put({key: frame}))
                assert elsewhere(lambda: session.contains([key])) == [True]
                assert elsewhere(lambda: session.get(key)) == frame
                elsewhere(lambda: session.forget([key]))
            finally:
                elsewhere(session.close)

    def test_opening_and_closing_leaks_nothing(self, place: Path) -> None:
        """A server that reopens its stack every hour runs out of files and threads if each open leaks one."""
        self.need()
        key = make_key(1)
        used: list[tuple[int, int]] = []
        for cycle in range(CYCLES):
            with self.open(place) as session:
                session.put({key: make_frame(key, cycle, self.small)})
                assert session.get(key) == make_frame(key, cycle, self.small)
            used.append(least_use(used[-1] if len(used) > 2 else None))
        files, threads = (after - before for after, before in zip(used[-1], used[2], strict=True))
        assert files < CYCLES - 3, f"{files} more open files after {CYCLES - 3} openings"
        assert threads < CYCLES - 3, f"{threads} more threads after {CYCLES - 3} openings"

    def test_a_failed_opening_leaves_nothing(self, place: Path) -> None:
        """The user repairs the directory and retries in the same process: the first try may keep no lock or file."""
        self.need_local()
        place.write_bytes(b"x" * 10 * KIB)
        used: list[tuple[int, int]] = []
        for _ in range(CYCLES):
            with contextlib.suppress(TierKVError):
                self.open(place).close()
            used.append(least_use(used[-1] if len(used) > 2 else None))
        files, threads = (after - before for after, before in zip(used[-1], used[2], strict=True))
        assert files < CYCLES - 3, f"{files} more open files after {CYCLES - 3} failed openings"
        assert threads < CYCLES - 3, f"{threads} more threads after {CYCLES - 3} failed openings"
        place.unlink()
        with self.open(place) as session:
            session.put({make_key(1): make_frame(make_key(1), 1, self.small)})

    def test_nothing_is_acknowledged_after_close(self, place: Path) -> None:
        """An abandoned call may end after close: its result must be true at the next open."""
        self.need("durable")
        key, size = make_key(1), self.small
        session = self.open(place)
        session.close_backend()
        try:
            (result,) = session.write({key: make_frame(key, 1, size)})
        except Exception as error:  # noqa: BLE001  # any error will do, as long as nothing is said to be stored
            result = TierKVError(str(error))
        session.close()
        with self.open(place) as again:
            found = again.get(key)
            assert found in {None, make_frame(key, 1, size)}
            assert result is not None or found is not None, "acknowledged after close, and lost"

    def test_close_while_calls_run(self, place: Path) -> None:
        """Close follows abandoned calls: it may neither wait for ever nor damage stored frames."""
        self.need()
        keys = [make_key(number) for number in range(3)]
        frames = {key: make_frame(key, 1, self.sizes[-1]) for key in keys}
        session = self.open(place)
        session.put(frames)
        stop, started, closing = threading.Event(), threading.Event(), threading.Event()

        def is_right(key: Key, frame: object) -> bool:
            if frame is None or isinstance(frame, TierKVError):
                return True
            # A library may take the end of its connection for that of the file; the check of the frame finds it.
            is_cut = closing.is_set() and isinstance(frame, bytes) and frames[key].startswith(frame)
            return is_cut or frame == frames[key]

        def read() -> None:
            while not stop.is_set():
                try:
                    found = session.read(keys)
                except Exception:  # noqa: BLE001  # whatever a closed backend says
                    found = []
                started.set()
                assert all(map(is_right, keys, found))

        with ThreadPoolExecutor(2, thread_name_prefix="conformance") as pool:
            readers = [pool.submit(read) for _ in range(2)]
            started.wait()
            time.sleep(_INTO_A_CALL_S)
            closing.set()
            session.close_backend()
            stop.set()
            for reader in readers:
                reader.result(timeout=60)
        session.close()
        if self.capabilities.durable:
            with self.open(place) as again:
                assert again.read(keys) == list(frames.values())

    def test_options_come_from_a_configuration(self, place: Path) -> None:
        """Users write options as TOML: every option that the suite sets in Python must have a form there."""
        options = self.make_options(place)
        given = {
            item.name: getattr(options, item.name)
            for item in dataclasses.fields(self.plugin.options)
            if isinstance(getattr(options, item.name), str | int | float)
        }
        made, problems = make_options(self.plugin, given, "tiers[0]")
        assert not problems, [str(problem) for problem in problems]
        assert isinstance(made, self.plugin.options)
        for name, value in given.items():
            assert getattr(made, name) == value, f"option {name} came back changed"

    def test_an_unknown_option_is_an_error(self) -> None:
        """A misspelled key that is ignored gives a tier other than the one described."""
        _, problems = make_options(self.plugin, {"no_such_option": 1}, "tiers[0]")
        assert any("no_such_option" in problem.path for problem in problems), problems

    def test_check_only_looks(self, place: Path) -> None:
        """``tierkv check`` runs before the first start and beside a running server: it reports, and changes nothing."""
        if self.plugin.check is None:
            self.not_applicable("has no check")
        options = self.make_options(place)
        findings = list(self.plugin.check(options, self.capacity_bytes))
        assert not place.exists(), "check made the place that it looked for"
        assert findings and all(isinstance(finding, CheckResult) for finding in findings)
        if not self.capabilities.durable or self.capabilities.read_only:
            return
        key, size = make_key(1), self.small
        with self.open(place) as session:
            session.put({key: make_frame(key, 1, size)})
        before = _content(place)
        assert all(isinstance(finding, CheckResult) for finding in self.plugin.check(options, self.capacity_bytes))
        assert _content(place) == before, "check changed files"
        with self.open(place) as session:
            list(self.plugin.check(options, self.capacity_bytes))
            assert session.get(key) == make_frame(key, 1, size)


def least_use(enough: tuple[int, int] | None) -> tuple[int, int]:
    """Open files and threads of this process: the minimum seen while others end.

    enough: stop as soon as it is no more than that.
    """
    files = threads = 1 << 30
    for attempt in range(SETTLE_ATTEMPTS):
        if attempt % 20 == 0:
            gc.collect()
        files, threads = min(files, _open_files()), min(threads, threading.active_count())
        if enough is None or (files <= enough[0] and threads <= enough[1]):
            break
        time.sleep(0.01)
    return files, threads


def _open_files() -> int:
    """Number of open files, where the system reports it (Linux); otherwise a constant."""
    listing = Path("/proc/self/fd")
    return len(list(listing.iterdir())) if listing.is_dir() else 0


def _content(place: Path) -> dict[str, bytes]:
    """All files below ``place``."""
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
