"""Damage at rest, by the thousand: copies of a backend's files are changed, and each is used in a forked process.

A backend's author writes two functions (:class:`Damage`): one that fills a place, and one that changes its files. The
third, which opens the place and looks for what broke, is mostly a :class:`~tierkv.testing.damage_use.Use`.
:func:`play_seeds` plays one change per seed. A seed repeats its change exactly, so a finding is a number. A process
that is ended by a signal, hangs or raises is a finding, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HANG_S = 30
"""Seconds for the use of one damaged place; beyond it, the backend hangs."""
OPEN_S_MAX = 5.0
"""Seconds within which a damaged place must be open."""
CHANGES_PER_PROCESS = 50
"""Changes that a process plays before the next one is forked; one that breaks a promise is its last."""
PAGE_BYTES = 4096
PROGRESS_S = 60.0
"""Seconds between two lines of progress in a log; a terminal shows each change."""
TEXT_CHARS_MAX = 150
"""Characters of a change, or of a broken promise, that are reported."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the use of one damaged place."""

    broken: str = ""
    """Promise that broke, in words; empty: none."""
    open_s: float = 0.0
    """Seconds that the backend took to open."""
    note: str = ""
    """Word that the summary counts, such as "emptied" or "refused"; empty: none."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Functions of one backend. All run on the main thread of a process of their own, but ``build``."""

    build: Callable[[Path], None]
    """Fill an empty place, and close the backend."""
    mutate: Callable[[Path, random.Random], str]
    """Change the files of a place. Returns the change in words, its kind first."""
    play: Callable[[Path], Outcome]
    """Open the place, read, delete and rewrite everything: mostly :meth:`~tierkv.testing.damage_use.Use.play`."""


@dataclass(slots=True)
class Summary:
    """Findings of all seeds."""

    broken: list[tuple[int, str, str]] = field(default_factory=list)
    """Seed, change and broken promise of each finding."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of changes of each kind."""
    notes: Counter[str] = field(default_factory=Counter)
    """Number of outcomes with each note."""
    slowest_s: float = 0.0
    """Longest time of opening in seconds."""


def play_seeds(damage: Damage, place: Path, seeds: Sequence[int], jobs: int = 1) -> Summary:
    """Play one change per seed, in forked processes. No other thread may run.

    Args:
        damage: the backend's functions.
        place: empty directory for all files; needs room for three copies per job.
        seeds: numbers of the changes.
        jobs: changes that are played side by side.
    """
    base, summary = place / "base", Summary()
    damage.build(base)
    reading, writing = os.pipe()
    players = [_forked(damage, place, seeds[first::jobs], reading, writing) for first in range(jobs)]
    os.close(writing)
    left, told_s = set(seeds), time.monotonic()
    with os.fdopen(reading, encoding="utf-8") as played:
        for line in played:
            seed, what, outcome = json.loads(line)
            left.discard(seed)
            _note(summary, seed, what, Outcome(**outcome))
            on_terminal, now_s = sys.stderr.isatty(), time.monotonic()
            if on_terminal or now_s - told_s >= PROGRESS_S:
                told_s, done = now_s, len(seeds) - len(left)
                start, end = ("\r", "") if on_terminal else ("", "\n")
                sys.stderr.write(f"{start}{done} of {len(seeds)}, {len(summary.broken)} broken{end}")
                sys.stderr.flush()
    for pid in players:
        os.waitpid(pid, 0)
    summary.broken += [(seed, "none", "it was not played") for seed in sorted(left)]
    summary.broken.sort()
    return summary


def _forked(damage: Damage, place: Path, seeds: Sequence[int], reading: int, writing: int) -> int:
    """Start a process that plays changes one after the other, and writes a line for each. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(reading)
        left = list(seeds)
        while left:
            played = _play_some(damage, place, left[:CHANGES_PER_PROCESS])
            if played[-1][1].broken and len(played) > 1:
                played[-1] = _again_alone(damage, place, left[len(played) - 1], played[-1])
            for seed, (what, outcome) in zip(left, played, strict=False):
                shortened = replace(outcome, broken=outcome.broken[:TEXT_CHARS_MAX])
                # At once, and shorter than a pipe may tear: the lines of several processes do not mix.
                os.write(writing, json.dumps([seed, what[:TEXT_CHARS_MAX], asdict(shortened)]).encode() + b"\n")
            del left[: len(played)]
    finally:
        os._exit(0)  # the caller's frames are not this process's


def _note(summary: Summary, seed: int, what: str, outcome: Outcome) -> None:
    summary.kinds[what.partition(" ")[0]] += 1
    summary.slowest_s = max(summary.slowest_s, outcome.open_s)
    if outcome.note:
        summary.notes[outcome.note] += 1
    if outcome.broken:
        summary.broken.append((seed, what, outcome.broken))


def _again_alone(damage: Damage, place: Path, seed: int, found: tuple[str, Outcome]) -> tuple[str, Outcome]:
    """Finding of a process that played other changes before; the words say so if the change alone breaks nothing."""
    ((what, alone),) = _play_some(damage, place, [seed])
    if alone.broken:
        return what, alone
    return what, replace(found[1], broken=f"not alone, but after others: {found[1].broken}")


def _play_some(damage: Damage, place: Path, seeds: Sequence[int]) -> list[tuple[str, Outcome]]:
    """Changes and outcomes, one after the other in a process of their own, up to the first that breaks a promise."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        for seed in seeds:
            if _play_here(damage, place / "base", place / str(seed), seed, writing).broken:
                break
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        lines = [json.loads(line) for line in pipe]
    _, status = os.waitpid(pid, 0)
    played = [(what, Outcome(**outcome)) for what, outcome in zip(lines[::2], lines[1::2], strict=False)]
    if status:
        end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
        played = [*played, (lines[-1] if len(lines) % 2 else "none", Outcome(end))][: len(seeds)]
        played[-1] = (played[-1][0], Outcome(end))
    shutil.rmtree(place / str(seeds[len(played) - 1]), ignore_errors=True)
    return played


def _play_here(damage: Damage, base: Path, place: Path, seed: int, report: int) -> Outcome:
    """Change a copy and use it; write change and outcome to ``report``, a line each."""
    what = "none"
    try:
        shutil.copytree(base, place)
        try:
            what = damage.mutate(place, random.Random(seed))
        finally:
            os.write(report, json.dumps(what).encode() + b"\n")
        signal.alarm(HANG_S)
        outcome = damage.play(place)
        if outcome.open_s > OPEN_S_MAX and not outcome.broken:
            outcome = replace(outcome, broken=f"opening took {outcome.open_s:.1f} seconds")
        shutil.rmtree(place, ignore_errors=True)
    except BaseException as error:  # noqa: BLE001 - whatever ends the process is a finding
        outcome = Outcome(f"{type(error).__name__}: {error}")
    signal.alarm(0)
    os.write(report, json.dumps(asdict(outcome)).encode() + b"\n")
    return outcome


def change_bytes(data: bytearray, rng: random.Random, start: int, end: int) -> str:
    """Change one to eight bytes between two offsets. Returns the change in words."""
    offset, length = rng.randrange(start, end), rng.choice((1, 1, 2, 4, 8))
    field_end = min(offset + length, len(data))
    width = field_end - offset
    how = rng.choice(("bit", "bit", "bit", "zero", "ones", "random", "plus"))
    if how == "bit":
        data[offset] ^= 1 << rng.randrange(8)
    elif how == "plus":
        value = int.from_bytes(data[offset:field_end], "little") + rng.choice((-2, -1, 1, 2))
        data[offset:field_end] = (value % (1 << 8 * width)).to_bytes(width, "little")
    else:
        fill = {"zero": b"\0" * 8, "ones": b"\xff" * 8, "random": rng.randbytes(8)}[how]
        data[offset:field_end] = fill[:width]
    return f"byte {offset} {how} {width}"


def change_pages(data: bytearray, rng: random.Random, pages: Sequence[int]) -> str:
    """Zero, halve, copy or swap pages of 4 KiB, out of at least two. Returns the change in words."""
    page, other = rng.sample(list(pages), 2)
    how = rng.choice(("zero", "copy", "swap", "half"))
    left = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
    right = slice(other * PAGE_BYTES, (other + 1) * PAGE_BYTES)
    if how == "zero":
        data[left] = bytes(PAGE_BYTES)
    elif how == "copy":
        data[left] = data[right]
    elif how == "swap":
        data[left], data[right] = data[right], data[left]
    else:
        data[page * PAGE_BYTES + 512 : (page + 1) * PAGE_BYTES] = bytes(PAGE_BYTES - 512)
    return f"{page} {how} {other}"


def change_length(data: bytearray, rng: random.Random) -> str:
    """Cut or lengthen a file. Returns the change in words."""
    size = len(data)
    how = rng.choice(("cut", "cut", "lengthen"))
    if how == "cut":
        anywhere = rng.randrange(size)
        del data[rng.choice((anywhere, anywhere // PAGE_BYTES * PAGE_BYTES, rng.randrange(3) * PAGE_BYTES)) :]
    else:
        data += rng.randbytes(rng.randrange(1, 3 * PAGE_BYTES))
    return f"{how} from {size} to {len(data)}"


def run_program(program: Path, place: Path, count: int, seed: int = 1) -> dict[str, Any]:
    """Run a backend's program of :func:`main`, as a test does. Returns its summary; a broken promise fails the test."""
    command = [sys.executable, program.name, "--place", str(place), "--count", str(count), "--seed", str(seed)]
    done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, timeout=60 + count, check=False)  # noqa: S603 - the caller's own program
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary: dict[str, Any] = json.loads(done.stdout)
    assert not summary["broken"]
    return summary


def main(damage: Damage) -> None:
    """Program of a backend: ``--count 1000 --seed 1 [--only 17] [--jobs 8] [--place DIR]``. Prints a summary as JSON.

    Raises:
        SystemExit: with status 1 if a promise broke.
    """
    parser = argparse.ArgumentParser(description="Change files of a tier at rest, and use each changed copy.")
    parser.add_argument("--count", type=int, default=300, help="number of changes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first change (default: %(default)s)")
    parser.add_argument("--only", type=int, help="number of the only change")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="changes side by side (default: one per core)")
    parser.add_argument("--place", type=Path, help="directory for all files; left out: a temporary one")
    arguments = parser.parse_args()
    logging.disable()
    first = arguments.seed
    seeds = range(first, first + arguments.count) if arguments.only is None else [arguments.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.place) as place:
        summary = play_seeds(damage, Path(place), seeds, max(1, arguments.jobs))
    fields = {name: getattr(summary, name) for name in ("broken", "kinds", "notes")}
    times = {"slowest_s": round(summary.slowest_s, 3), "seconds": round(time.monotonic() - started)}
    sys.stdout.write(json.dumps(fields | times) + "\n")
    sys.exit(bool(summary.broken))
