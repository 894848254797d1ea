"""``python -m harness crash``, ``exhaust`` and ``soak``: the programs behind the sessions of these names."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.crash import Calls, Cuts, Kills
from harness.exhaust import CAUSES, Exhaustion
from harness.lanes import Verdict
from harness.reporting import Board
from harness.soak import soak as run_soak
from harness.system_calls import SystemCalls, load
from harness.targets import TARGETS, rewrite_logs_often
from harness.upkeep import Upkeep

MODES = ("kills", "calls", "cuts", "upkeep")
COUNTS = {"kills": 45, "calls": 60, "cuts": 40, "upkeep": 22}
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
  upkeep  tierkv gc, rm, verify --repair, copy or warm is ended at one of its changes of files, and repeated
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
    parser.add_argument("--count", type=int, help="number of plays of each mode (45, 60, 40 and 22)")
    _add_common(parser)
    return parser


def crash(arguments: Sequence[str]) -> int:
    """Run the session ``crash``. Returns the exit status."""
    options = _crash_parser().parse_args(arguments)
    calls = load()
    logging.disable()
    rewrite_logs_often()
    board = Board(quiet=options.json)
    play: Callable[[int], Verdict]
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        for name, mode in itertools.product(options.backend or sorted(TARGETS), options.mode or MODES):
            title = f"{name} {mode}"
            if mode == "kills":
                play = Kills(TARGETS[name], Path(place) / title).play
            elif isinstance(calls, str):
                board.skip(title, calls)
                continue
            else:
                play = _play_of(mode, name, Path(place) / title, calls)
            board.play(title, play, itertools.count(options.seed), options.count or COUNTS[mode])
    return board.finish(as_json=options.json)


def _play_of(mode: str, name: str, place: Path, calls: SystemCalls) -> Callable[[int], Verdict]:
    if mode == "upkeep":
        return Upkeep(name, place, calls).play
    return (Calls if mode == "calls" else Cuts)(TARGETS[name], place, calls).play


EXHAUST_EXAMPLES = """\
examples:
  python -m nox -s exhaust                                     each cause once for each backend, about two minutes
  python -m nox -s exhaust -- --count 20                       twenty times
  python -m nox -s exhaust -- --backend disk --cause read-only

causes:
"""
SOAK_EXAMPLES = """\
examples:
  python -m nox -s soak                                        ten minutes
  python -m nox -s soak -- --minutes 60 --seed 7
"""


def _exhaust_parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {name:12} {cause.summary}" for name, cause in CAUSES.items())
    parser = argparse.ArgumentParser(
        prog="python -m nox -s exhaust --",
        description="Take away what tiers need for a while, and measure how soon a stack writes again.",
        epilog=EXHAUST_EXAMPLES + rows,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--backend", choices=sorted(TARGETS), action="append", help="backend; left out: all")
    parser.add_argument("--cause", choices=sorted(CAUSES), action="append", help="cause; left out: all")
    parser.add_argument("--count", type=int, default=1, help="number of times each (%(default)s)")
    _add_common(parser)
    return parser


def _directory(text: str) -> Path:
    """Directory of that name, made if there is none."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} cannot hold files: {exc.strerror}") from exc
    return path


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="first seed (%(default)s)")
    parser.add_argument("--json", action="store_true", help="totals as JSON on stdout")
    parser.add_argument("--place", type=_directory, help="directory for all files; left out: a temporary one")


def exhaust(arguments: Sequence[str]) -> int:
    """Run the session ``exhaust``. Returns the exit status."""
    options = _exhaust_parser().parse_args(arguments)
    calls = load()
    _log_nowhere()
    board = Board(quiet=options.json)
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        for name, cause in itertools.product(options.backend or sorted(TARGETS), options.cause or CAUSES):
            title = f"{name} {cause}"
            if isinstance(calls, str):
                board.skip(title, calls)
            else:
                play = Exhaustion(name, CAUSES[cause], Path(place) / title, calls).play
                board.play(title, play, itertools.count(options.seed), options.count)
    return board.finish(as_json=options.json)


def _log_nowhere() -> None:
    """Keep the log of the tiers off the terminal; the programs count its lines."""
    logging.lastResort = None


def soak(arguments: Sequence[str]) -> int:
    """Run the session ``soak``. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nox -s soak --",
        description="Run traffic and faults over a stack of all local backends, and see whether anything grows.",
        epilog=SOAK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length (%(default)s)")
    _add_common(parser)
    options = parser.parse_args(arguments)
    calls = load()
    _log_nowhere()

    def tell(share: float) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{share:.0%}")

    with tempfile.TemporaryDirectory(dir=options.place) as place:
        system_calls = None if isinstance(calls, str) else calls
        verdict, figures = run_soak(Path(place), system_calls, options.seed, options.minutes, tell)
    figures |= {"minutes": options.minutes, "seed": options.seed, "broken": verdict.broken}
    figures["without faults"] = calls if isinstance(calls, str) else ""
    lines = [json.dumps(figures, indent=1)] if options.json else [f"{name}: {value}" for name, value in figures.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(verdict.broken))


PROGRAMS: dict[str, Callable[[Sequence[str]], int]] = {"crash": crash, "exhaust": exhaust, "soak": soak}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
