"""``tierkv check``: check the description of a stack, and whether its storage is usable."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from tierkv.abc import CheckResult
from tierkv.cli.check_whole import check_files, check_plan, check_quotas, check_spans, check_whole
from tierkv.cli.output import Cell, print_json, print_table, verdict
from tierkv.cli.values import FiniteRange
from tierkv.config import HostConfig, ResolvedTier, format_size, load_sound_part, resolve_parts
from tierkv.config.problems import Problem, raise_problems, without_consequences
from tierkv.plugins.loading import load_plugins

PROBE_DEADLINE_S = 30


@dataclass(frozen=True, slots=True)
class TierCheck:
    """Check result of one tier."""

    tier: str
    """Configured name of the tier."""
    result: CheckResult
    """The result."""


@click.command()
@click.argument("stack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--deadline-s",
    type=FiniteRange(min=1, max=3600),
    default=PROBE_DEADLINE_S,
    show_default=True,
    help="Seconds to wait for the probes of all tiers together.",
)
@click.pass_context
def check(ctx: click.Context, *, stack: Path, as_json: bool, deadline_s: float) -> None:
    """Validate STACK and probe its tiers. Stored chunks stay as they are.

    Runs the checks of each backend (such as: the path is writable, there is room, the bucket answers) and names the
    fix of each failure, and checks the tiers together: memory of the host tier, size of chunks, places and capacities
    that collide, folders of the files that the stack writes. A bucket or a server gets one short object, which is
    removed again. A warning is no failure. Mistakes of the file are listed
    in the same pass: what is right in it is checked without them. Exit code 0: all checks passed; 1: a check failed;
    2: the file itself is wrong.

    \b
    Examples:
      tierkv check stack.toml
      tierkv check stack.yaml --json | jq '.findings[] | select(.ok | not)'
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    part = load_sound_part(stack)
    tiers, found = resolve_parts(part.config, load_plugins()) if part.config else ((), [])
    problems = [*part.problems, *without_consequences(found, part.problems)]
    host = part.config.host if part.config and part.knows_host else None
    is_sound = not any(problem.path.partition(".")[0] == "host" for problem in problems)
    whole = check_whole(host.capacity if host else None, tiers, part.config.chunk if part.config else None)
    quotas = check_quotas(host, tiers)
    own = (*check_plan(part.config), *check_files(part.config), *check_spans(part.config)) if part.config else ()
    results = [TierCheck(tier, result) for tier, result in (*whole, *quotas, *own)] + probe(tiers, deadline_s)
    if as_json:
        wrong = [TierCheck("", _finding(problem)) for problem in problems]
        rows = [{"tier": found.tier, **asdict(found.result)} for found in wrong + results]
        print_json({"stack": str(stack), "ok": all(row["ok"] for row in rows), "findings": rows})
    else:
        _print(stack, host if is_sound else None, results)
    raise_problems(str(stack), problems)
    ctx.exit(0 if all(found.result.ok for found in results) else 1)


def _finding(problem: Problem) -> CheckResult:
    return CheckResult(problem.path, ok=False, detail=str(problem), fix="correct the file")


def probe(tiers: Sequence[ResolvedTier], deadline_s: float) -> list[TierCheck]:
    """Run the checks of all tiers at once, each in its own thread. Threads that hang are abandoned.

    Returns:
        Results in the order of the tiers. A backend that raises or does not answer in time gives a failed result.
    """
    answers: queue.SimpleQueue[tuple[int, list[CheckResult]]] = queue.SimpleQueue()
    for index, tier in enumerate(tiers):

        def work(index: int = index, tier: ResolvedTier = tier) -> None:
            answers.put((index, _check_tier(tier)))

        # Daemon threads, so that a check that hangs in a dead mount does not keep the program running.
        threading.Thread(target=work, name=f"probe-{tier.config.name}", daemon=True).start()
    answered = dict(_collect(answers, len(tiers), deadline_s))
    late = CheckResult(
        "answer",
        ok=False,
        detail=f"none within {deadline_s:g} s",
        fix="check the mount or the network, or allow more time: --deadline-s",
    )
    return [
        TierCheck(tier.config.name, result)
        for index, tier in enumerate(tiers)
        for result in answered.get(index, [late])
    ]


def _collect(
    answers: queue.SimpleQueue[tuple[int, list[CheckResult]]], count: int, deadline_s: float
) -> Iterator[tuple[int, list[CheckResult]]]:
    deadline = time.monotonic() + deadline_s
    for _ in range(count):
        try:
            yield answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def _check_tier(tier: ResolvedTier) -> list[CheckResult]:
    found: list[CheckResult] = []
    if tier.backend.check is None:
        found.append(CheckResult("probe", ok=True, detail=f"backend {tier.backend.name!r} has no checks"))
    else:
        found += run_check(partial(tier.backend.check, tier.options, tier.config.capacity))
    if tier.codec.check is not None:
        found += run_check(partial(tier.codec.check, tier.codec_options))
    return found


def run_check(run: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    """Return the results of a plugin's check. A fault of the plugin is a failed result."""
    try:
        found: list[object] = list(run())
    except Exception as error:  # noqa: BLE001  plugin code may raise anything; the text is shown to the user
        return [_plugin_fault(f"{type(error).__name__}: {error}")]
    return [
        item if isinstance(item, CheckResult) else _plugin_fault(f"gave {item!r:.80}, no CheckResult") for item in found
    ]


def _plugin_fault(detail: str) -> CheckResult:
    return CheckResult("probe", ok=False, detail=detail, fix="report it to the authors of the plugin")


def _print(stack: Path, host: HostConfig | None, results: Iterable[TierCheck]) -> None:
    rows: list[Sequence[Cell]] = []
    if host is not None:
        facts = f"{format_size(host.capacity)}, policy {host.policy}"
        rows.append(("host", "configuration", verdict(ok=True), facts, ""))
    rows += [
        (found.tier, found.result.subject, _verdict(found.result), found.result.detail, found.result.fix)
        for found in results
    ]
    print_table(str(stack), ("tier", "subject", "result", "detail", "fix"), rows)


def _verdict(result: CheckResult) -> Text:
    return verdict(ok=result.ok, warns=result.warns)
