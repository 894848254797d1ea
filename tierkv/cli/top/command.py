"""``tierkv top``: the command and its loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import RenderableType
from rich.live import Live

from tierkv.cli.output import console, print_json
from tierkv.cli.top.changes import Change, Changes
from tierkv.cli.top.figures import StackFigures, stack_figures
from tierkv.cli.top.screen import whole_screen
from tierkv.cli.top.sources import NoSampleError, Sample, Source, source_of
from tierkv.cli.top.window import Window
from tierkv.cli.values import FiniteRange

INTERVAL_S = 2.0
ONCE_S = 2.0
"""Seconds between the two samples of ``--once`` and ``--json``: rates need two."""
SILENT_S = 20.0
"""Seconds after which a source without new samples is shown as silent."""
FIXED_LINES = 9
"""Lines of the screen beside tiers and changes, for one stack."""
ONCE_CHANGES = 10


class Watch:
    """Everything known about the stacks of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.changes = Changes()
        self.note = ""
        """Trouble with the source; empty if there is none."""
        self._windows: dict[str, Window] = {}
        self.trouble = ""
        """Reason why the source gave no samples, as of the last time that it gave none."""
        self._latest_s = 0.0

    def look(self) -> None:
        """Read new samples. A source that gives none is noted, and asked again by the next call."""
        try:
            for sample in self.source.read():
                self._take(sample)
        except NoSampleError as error:
            self.trouble, self.note = str(error), f"{error}; asked again"
            return
        silent_s = time.time() - self._latest_s
        self.note = ""
        if self._latest_s and silent_s > SILENT_S:
            self.note = f"no new figures for {silent_s:.0f} s: the engine makes no steps, or has ended"

    def _take(self, sample: Sample) -> None:
        self._latest_s = sample.at_s
        for labels, values in sample.stacks.items():
            window = self._windows.setdefault(labels, Window())
            before = window.latest
            if not window.add(sample.at_s, values):
                self.changes.note(Change(sample.at_s, sample.at_s, labels, "", "the process has begun anew"))
            elif before:
                self.changes.note_all(sample.at_s, labels, before, values)
        for labels in self._windows.keys() - sample.stacks.keys():
            del self._windows[labels]

    @property
    def stacks(self) -> list[StackFigures]:
        """Figures of each stack."""
        return [stack_figures(labels, window) for labels, window in sorted(self._windows.items())]


@click.command()
@click.argument("target", required=False)
@click.option("--record", type=click.Path(), help="A record as TARGET, written as for the other commands.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(min=0.2),
    default=INTERVAL_S,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Look twice, two seconds apart, print the figures and end.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def top(*, target: str | None, record: str | None, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch a running stack: its tiers, hits, speeds, queues, and what happened.

    TARGET is the address that serves metrics (`:9400`, `host:8000`, `http://host:8000/metrics`), or the record of a
    stack (`record.path` in its configuration), which has figures every five seconds of a busy engine. Ctrl-C ends.

    `hits` is the share of the asked tokens, over the last seconds; `time` is the mean of a batch of chunks; `queue` has
    the operations that wait for a call, then the chunks that wait to be written. A fill with `!` has less room than its
    capacity. Exit code 2: the target does not answer, or with something else.

    \b
    Examples:
      tierkv top :9400
      tierkv top http://127.0.0.1:8000/metrics --interval 5
      tierkv top run.jsonl
      tierkv top :9400 --json | jq '.stacks[0].tiers[].hit_rate'
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    name = target or record
    if name is None or record not in (None, name):
        raise click.UsageError("give one TARGET: an address that serves metrics, or the record of a stack")
    watch = Watch(source_of(name))
    watch.look()
    if not watch.stacks:
        raise NoFiguresError(watch.trouble or _EMPTY.format(name=watch.source.name))
    if once or as_json or not sys.stdout.isatty():
        if watch.stacks[0].window_s == 0:
            time.sleep(ONCE_S)
            watch.look()
        _print_once(watch, as_json=as_json)
    else:
        _run(watch, interval_s)


_EMPTY = "{name}: the record has no figures yet: the engine made no step, or an earlier version of tierkv wrote it"


class NoFiguresError(click.ClickException):
    """The target gives no figures. The message says why."""

    exit_code = 2


def _print_once(watch: Watch, *, as_json: bool) -> None:
    changes = watch.changes.latest(ONCE_CHANGES)
    if as_json:
        happened = [{"at_s": one.last_s, "stack": one.labels, "tier": one.tier, "text": one.text} for one in changes]
        stacks = [asdict(stack) for stack in watch.stacks]
        print_json({"source": watch.source.name, "note": watch.note, "stacks": stacks, "changes": happened})
    else:
        console().print(_screen(watch, watch.stacks, changes))


def _run(watch: Watch, interval_s: float) -> None:
    """Draw until interrupted."""
    terminal = console()
    with Live(console=terminal, screen=True, auto_refresh=False) as live:
        try:
            while True:
                stacks = watch.stacks
                rows = sum(len(stack.tiers) + FIXED_LINES - 2 for stack in stacks)
                free = max(3, terminal.height - rows - 2)
                live.update(_screen(watch, stacks, watch.changes.latest(free)), refresh=True)
                time.sleep(interval_s)
                watch.look()
        except KeyboardInterrupt:
            pass


def _screen(watch: Watch, stacks: Sequence[StackFigures], changes: Sequence[Change]) -> RenderableType:
    return whole_screen(watch.source.name, stacks, changes, watch.note, console().width)
