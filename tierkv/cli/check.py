"""``tierkv check``: is a stack described well, and are the places it names usable?"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click

from tierkv.abc import CheckResult
from tierkv.cli.output import print_json, print_table, verdict
from tierkv.config import ResolvedStack, ResolvedTier, format_size, load_config, resolve
from tierkv.plugins.loading import load_plugins

PROBE_DEADLINE_S = 30


@dataclass(frozen=True, slots=True)
class TierFinding:
    """A finding about one tier; ``tier`` is its configured name."""

    tier: str
    finding: CheckResult


@click.command()
@click.argument("stack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--deadline-s",
    type=click.IntRange(min=1, max=3600),
    default=PROBE_DEADLINE_S,
    show_default=True,
    help="Seconds to wait for the probes of all tiers together.",
)
@click.pass_context
def check(ctx: click.Context, *, stack: Path, as_json: bool, deadline_s: int) -> None:
    """Validate STACK and probe its tiers, without changing anything.

    Looks at what each backend knows to look at (is the path writable, is there room, does the bucket answer) and says
    what to fix. Exit code 0: all is well; 1: a probe failed; 2: the file itself is wrong.

    \b
    Examples:
      tierkv check stack.toml
      tierkv check stack.yaml --json | jq '.findings[] | select(.ok | not)'
    """  # noqa: D301  click reads the control character: what follows is not wrapped
    resolved = resolve(load_config(stack), load_plugins(), str(stack))
    findings = probe(resolved, deadline_s)
    ok = all(found.finding.ok for found in findings)
    if as_json:
        rows = [{"tier": found.tier, **asdict(found.finding)} for found in findings]
        print_json({"stack": str(stack), "ok": ok, "findings": rows})
    else:
        _print(stack, resolved, findings)
    ctx.exit(0 if ok else 1)


def probe(stack: ResolvedStack, deadline_s: float) -> list[TierFinding]:
    """Ask every tier's backend to look at its place; all at once, each in a thread that is left behind if it hangs.

    Returns:
        Findings in the order of the tiers. A backend that raises or does not answer in time is a finding, too.
    """
    answers: queue.SimpleQueue[tuple[int, list[CheckResult]]] = queue.SimpleQueue()
    for index, tier in enumerate(stack.tiers):

        def work(index: int = index, tier: ResolvedTier = tier) -> None:
            answers.put((index, _findings_of(tier)))

        # Daemons: a probe that hangs in a dead mount must not keep the program from ending.
        threading.Thread(target=work, name=f"probe-{tier.config.name}", daemon=True).start()
    answered = dict(_collect(answers, len(stack.tiers), deadline_s))
    late = CheckResult(
        "answer",
        ok=False,
        detail=f"none within {deadline_s:g} s",
        fix="look at the mount or the network, or give it time: --deadline-s",
    )
    return [
        TierFinding(tier.config.name, finding)
        for index, tier in enumerate(stack.tiers)
        for finding in answered.get(index, [late])
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


def _findings_of(tier: ResolvedTier) -> list[CheckResult]:
    found: list[CheckResult] = []
    if tier.backend.check is None:
        found.append(CheckResult("probe", ok=True, detail=f"backend {tier.backend.name!r} has nothing to look at"))
    else:
        found += _asked(partial(tier.backend.check, tier.options, tier.config.capacity))
    if tier.codec.check is not None:
        found += _asked(partial(tier.codec.check, tier.codec_options))
    return found


def _asked(look: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    """What a plugin finds; what it does wrong is a finding, too."""
    try:
        found: list[object] = list(look())
    except Exception as error:  # noqa: BLE001  a plugin's code: whatever it raises is what the user must hear
        return [_plugin_fault(f"{type(error).__name__}: {error}")]
    return [
        item if isinstance(item, CheckResult) else _plugin_fault(f"gave {item!r:.80}, no CheckResult") for item in found
    ]


def _plugin_fault(detail: str) -> CheckResult:
    return CheckResult("probe", ok=False, detail=detail, fix="report it to the authors of the plugin")


def _print(stack: Path, resolved: ResolvedStack, findings: Iterable[TierFinding]) -> None:
    host = resolved.config.host
    rows = [("host", "configuration", verdict(ok=True), f"{format_size(host.capacity)}, policy {host.policy}", "")]
    rows += [
        (found.tier, found.finding.subject, verdict(ok=found.finding.ok), found.finding.detail, found.finding.fix)
        for found in findings
    ]
    print_table(str(stack), ("tier", "subject", "result", "detail", "fix"), rows)
