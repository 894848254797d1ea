"""``python -m nox -s simulate``: play seeds, and report those that broke a promise."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from rich import progress as bars
from rich.console import Console

from simulation.drawing.scenarios import SCENARIOS
from simulation.report import Progress, story, summary, total
from simulation.runner import STEPS, Outcome, simulate

SEEDS = 200

EXAMPLES = """\
examples:
  python -m nox -s simulate                   200 seeds, from 0 on
  python -m nox -s simulate -- --seed 4711            one seed, as a failure says it
  python -m nox -s simulate -- --seeds 2000 --first 1000 --scenario storm
  python -m nox -s simulate -- --seeds 5000           a million steps, for a night
  python -m nox -s simulate -- --seeds 50 --json > outcomes.json
  python -m nox -s simulate -- --jobs 1       leaves the other processors alone

scenarios:
"""


def _parser() -> argparse.ArgumentParser:
    rows = "\n".join(f"  {scenario.name:12} {scenario.summary}" for scenario in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m nox -s simulate --",
        description="Play a day of faults per seed: a real stack under simulated time, with every byte checked.",
        epilog=EXAMPLES + rows,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_positive, default=None, metavar="N", help=f"how many seeds ({SEEDS})")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="one seed, or the first of --seeds")
    parser.add_argument("--first", type=int, default=None, metavar="S", help="the first seed (0)")
    parser.add_argument("--steps", type=_positive, default=STEPS, metavar="N", help=f"steps of trouble ({STEPS})")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="what to stress; left out, each seed chooses")
    parser.add_argument("--jobs", type=_positive, default=_processors(), metavar="N", help="processes (all processors)")
    parser.add_argument("--json", action="store_true", help="one JSON object with every outcome, on stdout")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns 0 if all seeds passed, otherwise 1."""
    options = _parser().parse_args(arguments)
    first = options.seed if options.seed is not None else (options.first or 0)
    count = options.seeds or (1 if options.seed is not None else SEEDS)
    errors = Console(stderr=True)
    outcomes: list[Outcome] = []
    lines = None if errors.is_terminal else Progress(count, _write_line)
    with _bar(errors, quiet=lines is not None or options.json or count == 1) as bar:
        task = bar.add_task("simulating", total=count)
        play = partial(simulate, steps=options.steps, scenario=options.scenario)
        for outcome in _outcomes(play, range(first, first + count), min(options.jobs, count)):
            outcomes.append(outcome)
            bar.advance(task)
            if lines is not None:
                lines.add(outcome)
            if outcome.finding is not None:
                errors.print(story(outcome), markup=False, highlight=False, soft_wrap=True)
                if options.fail_fast:
                    break
    failed = [outcome.seed for outcome in outcomes if outcome.finding is not None]
    if options.json:
        dicts = [outcome.as_dict() for outcome in outcomes]
        document = {"failed": failed, "totals": total(outcomes), "outcomes": dicts}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        sys.stdout.write(summary(outcomes) + "\n")
    return 1 if failed else 0


def _outcomes(play: Callable[[int], Outcome], seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes in the order of the seeds. A seed decides everything, wherever it is played.

    Raises:
        BrokenProcessPool: a process died.
    """
    if jobs == 1:
        yield from map(play, seeds)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(play, seeds)
    finally:
        pool.shutdown(cancel_futures=True)


def _write_line(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def _bar(console: Console, *, quiet: bool) -> bars.Progress:
    numbers = (bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *numbers)
    return bars.Progress(*columns, console=console, disable=quiet)


if __name__ == "__main__":
    sys.exit(main())
