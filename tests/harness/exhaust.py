"""Causes of ``nox -s exhaust``: what a file system refuses for a while, and how soon a tier writes again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.lanes import Send, Verdict
from harness.processes import SILENCE, run_alone
from harness.system_calls import ALL_CALLS, NO_CALLS, Call, SystemCalls
from harness.traffic import LogLines, Traffic, bytes_written, open_engine
from tierkv.testing.engines.hand_engine import HandEngine

TROUBLE_S = 3.0
"""Seconds for which a cause lasts."""
HEAL_MAX_S = 8.0
"""Longest time in seconds from the end of a cause to the first write."""
TRUTH_MAX_S = 1.5
"""Seconds without a written byte after which a tier must say that it is not writable."""
LINES_MAX = 16
"""Log lines of one cause: each change of a state has one, and repeats are counted in the next one."""
SMALL_DISK_MIB = 12
CHANGES = Call.OPEN | Call.WRITE | Call.RENAME | Call.LINK | Call.UNLINK | Call.TRUNCATE | Call.ALLOCATE | Call.MKDIR


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that keeps a tier from writing for a while."""

    summary: str
    """Words for the help."""
    lasting: Callable[[Path, SystemCalls], contextlib.AbstractContextManager[None]]
    """The cause exists within this context."""
    small_disk: bool = False
    """Whether the place is a small file system of its own."""


@contextlib.contextmanager
def _refused(calls: SystemCalls, which: Call, error: int) -> Iterator[None]:
    calls.refuse(which, error)
    try:
        yield
    finally:
        calls.refuse(NO_CALLS)


@contextlib.contextmanager
def _limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextlib.contextmanager
def _filled(place: Path) -> Iterator[None]:
    """Let another program take all free bytes."""
    with (place / "other").open("wb", buffering=0) as file:
        for size in (64 * 1024, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    try:
        yield
    finally:
        (place / "other").unlink()


def _descriptors_left(count: int) -> int:
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208  names, no paths
    return used + count


CAUSES = {
    "read-only": Cause("the file system turns read-only", lambda _, calls: _refused(calls, CHANGES, errno.EROFS)),
    "dead": Cause("every call that changes files fails", lambda _, calls: _refused(calls, ALL_CALLS, errno.EIO)),
    "unsynced": Cause("every sync fails", lambda _, calls: _refused(calls, Call.SYNC, errno.EIO)),
    "full": Cause("another program fills a small disk", lambda place, _: _filled(place), small_disk=True),
    "quota": Cause(
        "no block is free",
        lambda _, calls: _refused(calls, Call.WRITE | Call.ALLOCATE | Call.OPEN, errno.ENOSPC),
    ),
    "no-links": Cause("no hard links", lambda _, calls: _refused(calls, Call.LINK, errno.EPERM)),
    "descriptors": Cause(
        "no descriptor is left",
        lambda _p, _c: _limited(resource.RLIMIT_NOFILE, _descriptors_left(1)),
    ),
    "file-size": Cause("no file may grow", lambda _p, _c: _limited(resource.RLIMIT_FSIZE, 8192)),
}


def small_disk_or_reason(place: Path) -> str:
    """Mount a small file system for this process alone. Returns an empty text, or why that is not possible."""
    try:
        os.unshare(os.CLONE_NEWNS)  # type: ignore[attr-defined,unused-ignore]  # since Python 3.12
    except AttributeError:
        import ctypes  # noqa: PLC0415  only where the system's own call is missing

        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):
            return f"may not mount: {os.strerror(ctypes.get_errno())}"
    except OSError as error:
        return f"may not mount: {error.strerror}"
    shell = 'mount --make-rprivate / && mount -t tmpfs -o size="$0"m tmpfs "$1"'
    command = ["sh", "-c", shell, str(SMALL_DISK_MIB), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"may not mount: {done.stderr.strip()}" if done.returncode else ""


class Exhaustion:
    """One backend and one cause."""

    def __init__(self, backend: str, cause: Cause, place: Path, calls: SystemCalls) -> None:
        self._backend = backend
        self._cause = cause
        self._place = place
        self._calls = calls

    def play(self, seed: int) -> Verdict:
        """Let the cause last for a while, and measure the time until the tier writes again."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(mode=0o700)
        messages, ends = run_alone(lambda send: self._use(seed, send))
        kind, content = messages[-1] if messages else SILENCE
        if kind == "raised" or ends:
            return Verdict(f"{content} {' '.join(ends)}".strip())
        verdict: Verdict = content
        return verdict

    def _use(self, seed: int, _send: Send) -> Verdict:
        if self._cause.small_disk and (reason := small_disk_or_reason(self._place)):
            return Verdict(note=reason)
        lines = LogLines()
        logging.getLogger().addHandler(lines)
        self._calls.watch(self._place)
        engine = open_engine(self._place, [self._backend])
        traffic = Traffic(engine, seed, 40)
        first = traffic.store_new()
        engine.step_until(lambda: bytes_written(engine.stack)[self._backend], "the first write")
        with self._cause.lasting(self._place, self._calls):
            broken = self._watch(engine, traffic)
        ended_s = time.monotonic()
        before = bytes_written(engine.stack)[self._backend]
        while bytes_written(engine.stack)[self._backend] == before:
            if time.monotonic() - ended_s > HEAL_MAX_S:
                return Verdict(f"no write succeeds {HEAL_MAX_S:g} s after the cause; log: {lines.lines[-3:]}")
            traffic.store_new()
            time.sleep(0.02)
        heal_s = time.monotonic() - ended_s
        engine.step_until(lambda: engine.stack.tiers.health()[self._backend].writable, "health to say writable")
        engine.stack.reset_cache()
        engine.load(first)
        engine.stack.close(timeout_s=10)
        if len(lines.lines) > LINES_MAX:
            broken = broken or f"{len(lines.lines)} log lines: {lines.counts.most_common(3)}"
        return Verdict(broken, open_s=0.0, heal_s=heal_s)

    def _watch(self, engine: HandEngine, traffic: Traffic) -> str:
        """Store while the cause lasts. Returns a finding about health, or an empty text."""
        stack = engine.stack
        began_s = time.monotonic()
        written, written_s = bytes_written(stack)[self._backend], began_s
        broken = ""
        while (now_s := time.monotonic()) - began_s < TROUBLE_S:
            traffic.store_new()
            time.sleep(0.01)
            if (total := bytes_written(stack)[self._backend]) > written:
                written, written_s = total, now_s
            is_silent = now_s - written_s > TRUTH_MAX_S
            if is_silent and stack.tiers.health()[self._backend].writable:
                broken = f"nothing was written for {TRUTH_MAX_S:g} s, and health says writable"
        return broken
