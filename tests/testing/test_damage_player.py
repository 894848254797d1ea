"""Damage played by the thousand: on several cores, each change once, and every end of a process is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal
from tierkv.testing.damage import Damage, Outcome, main

def build(place):
    place.mkdir()
    (place / "file").write_text("sound")

def mutate(place, rng):
    number = int(place.name)
    (place / "file").write_text(str(number))
    return f"{'even' if number % 2 == 0 else 'odd'} {number}"

def play(place):
    number = int((place / "file").read_text())
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 4:
        raise ValueError("x" * 5000)
    return Outcome("it is five" if number == 5 else "", number / 1000, "seven" if number == 7 else "")

main(Damage(build, mutate, play))
"""


@pytest.mark.parametrize("jobs", [1, 3, 20])
def test_each_change_is_played_once_and_its_end_is_reported(tmp_path: Path, jobs: int) -> None:
    """A run of a night on all cores must find what a run on one finds: a finding is the number that repeats it."""
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "--place",
        str(tmp_path),
        "--count",
        "9",
        "--seed",
        "1",
        "--jobs",
        str(jobs),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert [(seed, what) for seed, what, _ in summary["broken"]] == [(3, "odd 3"), (4, "even 4"), (5, "odd 5")]
    assert [why[:10] for _, _, why in summary["broken"]] == ["SIGSEGV", "ValueError", "it is five"]
    assert summary["kinds"] == {"odd": 5, "even": 4}
    assert summary["notes"] == {"seven": 1}
    assert summary["slowest_s"] == 0.009
    assert not list(tmp_path.iterdir())


AFTER_OTHERS = """
import os, threading, time
from tierkv.testing import damage
from tierkv.testing.damage import Damage, Outcome, main

damage.PROGRESS_S = 0.0
played = []

def play(place):
    played.append(int(place.name))
    if played == [1, 2, 3]:
        return Outcome("it met what 1 and 2 left over")
    if played == [4, 5]:
        threading.Timer(0.1, os._exit, [7]).start()
    if 6 in played:
        time.sleep(1)
    return Outcome(open_s=5.5 if place.name == "7" else 0.0)

main(Damage(lambda place: place.mkdir(), lambda place, rng: "change", play))
"""


def test_what_one_change_leaves_for_the_next_is_found(tmp_path: Path) -> None:
    """A finding that needs other changes before it says so, also an end between two reports; a slow opening is one."""
    command = [
        sys.executable,
        "-c",
        AFTER_OTHERS,
        "--place",
        str(tmp_path),
        "--count",
        "8",
        "--seed",
        "1",
        "--jobs",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    summary = json.loads(done.stdout)
    after = "not alone, but after others: "
    assert summary["broken"] == [
        [3, "change", f"{after}it met what 1 and 2 left over"],
        [6, "change", f"{after}exit status 7"],
        [7, "change", "opening took 5.5 seconds"],
    ]
    assert summary["kinds"] == {"change": 8}
    assert done.stderr.splitlines()[-1] == "8 of 8, 3 broken"
