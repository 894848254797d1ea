"""``python -m harness crash``: the program behind the session of that name."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.crash import Calls, Cuts, Kills
from harness.reporting import Board
from harness.system_calls import load
from harness.targets import TARGETS, rewrite_logs_often

MODES = ("kills", "calls", "cuts")
COUNTS = {"kills": 45, "calls": 60, "cuts": 40}
"""Number of plays for each target and mode in a short run."""

CRASH_EXAMPLES = """\
examples:
  python -m nox -s crash                                   about a minute
  python -m nox -s crash -- --count 1000                   the nightly form: 1,000 per backend and mode
  python -m nox -s crash -- --backend lmdb --mode calls --seed 4711 --count 1      one play, as a failure says it

modes:
  kills   three processes with two threads each write, and are killed at a random instant
  calls   one system call fails with EIO, ENOSPC, EROFS or EMFILE, writes a part, or ends the process before, after or
          within it; then everything must be storable without opening the place again
  cuts    a journal of all calls is cut at any instant, and any part of what was not forced is lost
"""


def _crash_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nox -s crash --",
        description="Kill writers, fail system calls and cut the power, and look for lost and wrong bytes.",
        epilog=CRASH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=sorted(TARGETS), action="append", help="backend; left out: all")
    parser.add_argument("--mode", choices=MODES, action="append", help="mode; left out: all")
    parser.add_argument("--count", type=int, help="number of kills, faults and cuts each (45, 60 and 40)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="totals as JSON on stdout")
    parser.add_argument("--place", type=Path, help="directory for all files; left out: a temporary one")
    return parser


def crash(arguments: Sequence[str]) -> int:
    """Run the session ``crash``. Returns the exit status."""
    options = _crash_parser().parse_args(arguments)
    calls = load()
    logging.disable()
    rewrite_logs_often()
    board = Board(quiet=options.json)
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        for name, mode in itertools.product(options.backend or sorted(TARGETS), options.mode or MODES):
            title = f"{name} {mode}"
            if mode == "kills":
                play = Kills(TARGETS[name], Path(place) / title).play
            elif isinstance(calls, str):
                board.skip(title, calls)
                continue
            else:
                mode_of = {"calls": Calls, "cuts": Cuts}[mode]
                play = mode_of(TARGETS[name], Path(place) / title, calls).play
            board.play(title, play, itertools.count(options.seed), options.count or COUNTS[mode])
    return board.finish(as_json=options.json)


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {"crash": crash}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
