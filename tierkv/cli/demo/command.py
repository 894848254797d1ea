"""Command ``tierkv demo``: three processes in turn, then the comparison."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkv.cli.demo.damage import corrupt_at_rest
from tierkv.cli.demo.engines import MODELS, TENSOR_PARALLEL_MAX, engine_of
from tierkv.cli.demo.page import demo_page
from tierkv.cli.demo.phases import Phase, PhaseResult
from tierkv.cli.demo.processes import run_in_new_process
from tierkv.cli.demo.report import DemoReport
from tierkv.cli.demo.workload import WorkloadConfig, make_conversations
from tierkv.cli.output import print_json
from tierkv.cli.pages import HTML_OPTION, write_page
from tierkv.cli.values import WholeRange
from tierkv.config.loading import default_mapping, load_config, load_default, parse_config
from tierkv.config.reading import read_mapping
from tierkv.config.resolving import resolve
from tierkv.errors import ConfigError
from tierkv.plugins.loading import load_plugins
from tierkv.reference.configs import EngineConfig
from tierkv.stack.opening import open_stack

WORKLOAD = WorkloadConfig()


@click.command()
@click.option(
    "--model",
    type=click.Choice(list(MODELS)),
    default="tiny",
    show_default=True,
    help="tiny: full attention. hybrid: layers with a sliding window and full ones, three KV groups.",
)
@click.option(
    "--tensor-parallel",
    type=WholeRange(1, TENSOR_PARALLEL_MAX),
    default=1,
    show_default=True,
    metavar="RANKS",
    help="Split the heads: each rank has a KV pool and copies between it and the common host tier.",
)
@click.option(
    "--stack",
    "stack_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Use this stack instead of the built-in one (host, disk, objects).",
)
@click.option(
    "--object-url",
    metavar="URL",
    help="URL of the built-in stack's objects, such as s3://bucket/prefix. Default: a local directory.",
)
@click.option(
    "--workdir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory of the built-in stack's tiers. Default: a temporary directory, removed at the end.",
)
@click.option(
    "--conversations",
    type=WholeRange(1, 1000),
    default=WORKLOAD.conversations,
    show_default=True,
    help="Number of users.",
)
@click.option("--seed", type=int, default=WORKLOAD.seed, show_default=True, help="Seed of the conversations.")
@click.option("--corrupt", is_flag=True, help="Flip stored bytes before the conversations continue.")
@HTML_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(  # noqa: PLR0913 - one argument per option
    *,
    model: str,
    tensor_parallel: int,
    stack_file: Path | None,
    object_url: str | None,
    workdir: Path | None,
    conversations: int,
    seed: int,
    corrupt: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Serve conversations through a stack, continue them in a new process, and compare every token.

    A small model serves several turns of conversations that share system prompts. GPU pool and host tier are too
    small for them, so chunks are written to every tier. Then a new process with an empty engine continues all
    conversations and loads their prefixes instead of computing them. Every token is compared with a run without
    tierkv.

    Exit code 0: all tokens are equal; 1: some differ; 2: the stack cannot be used.

    \b
    Examples:
      tierkv demo
      tierkv demo --corrupt                     corrupt chunks are detected and recomputed
      tierkv demo --model hybrid                sliding windows: only the needed chunks are loaded
      tierkv demo --tensor-parallel 2           two ranks, one host tier
      tierkv demo --object-url s3://my-bucket/demo
      tierkv demo --html demo.html
      tierkv demo --stack lmdb.toml --json
    """  # noqa: D301 - click reads the control character, and does not wrap the rest
    _require_torch(stack_file)
    if stack_file is not None and (object_url is not None or workdir is not None):
        raise click.UsageError("--stack has its own storage: remove --object-url and --workdir")
    try:
        engine = engine_of(model, tensor_parallel)
    except ValueError as error:
        raise click.UsageError(f"--tensor-parallel {tensor_parallel}: {error}") from None
    with _directory(workdir) as place:
        stack = _stack(stack_file, place, object_url, engine)
        workload = replace(WORKLOAD, conversations=conversations, seed=seed)
        report = _run(stack, engine, workload, corrupt=corrupt)
    if html is not None:
        write_page(demo_page(report.as_json()), html)
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    sys.exit(1 if report.problems else 0)


def _require_torch(stack_file: Path | None) -> None:
    """Refuse a demo without torch; the command in the message also installs the backends that the stack lacks.

    Raises:
        ConfigError: torch is not installed, or the stack file is wrong.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    config = load_default(Path()) if stack_file is None else load_config(stack_file)
    folders = load_plugins().missing_packages(tier.backend for tier in config.tiers)
    command = f"in a checkout of tierkv: pip install . {' '.join(folders)} torch" if folders else "pip install torch"
    raise ConfigError(
        f"the demo's model computes with torch, which is not installed; {command} (its build for CPUs suffices)"
    )


@contextlib.contextmanager
def _directory(workdir: Path | None) -> Iterator[Path]:
    if workdir is not None:
        workdir.mkdir(parents=True, exist_ok=True)
        yield workdir.resolve()
        return
    place = Path(tempfile.mkdtemp(prefix="tierkv-demo-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _stack(stack_file: Path | None, place: Path, object_url: str | None, engine: EngineConfig) -> dict[str, Any]:
    """Return the stack as plain values, validated and opened once before any process starts."""
    described = dict(read_mapping(stack_file)) if stack_file is not None else default_mapping(place)
    if object_url is not None:
        described["tiers"][-1]["url"] = object_url
    source = str(stack_file or "the built-in stack")
    plugins = load_plugins()
    parse_config(described, source)
    # A stack opens without a tier that it cannot open; here that would show nothing.
    described["tiers"] = [{"required": True, **tier} for tier in described.get("tiers", ())]
    config = parse_config(described, source)
    resolve(config, plugins, source)
    open_stack(config, engine.engine_spec(), plugins=plugins).close()
    return described


def _run(stack: dict[str, Any], engine: EngineConfig, workload: WorkloadConfig, *, corrupt: bool) -> DemoReport:
    talks, before = workload.conversations, tuple(range(workload.turns))
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bars:
        rows = {
            "plain": bars.add_task("without tierkv", total=talks * (workload.turns + 1)),
            "fill": bars.add_task("with tierkv: fill the tiers", total=talks * workload.turns),
            "again": bars.add_task("new process: conversations return", total=talks),
        }

        def run(row: str, phase: Phase, done: int = 0) -> PhaseResult:
            return run_in_new_process(phase, lambda served: bars.update(rows[row], completed=done + served))

        def phase(name: str, **fields: Any) -> Phase:  # noqa: ANN401 - fields of Phase
            fields.setdefault("conversations", make_conversations(workload))
            return Phase(name=name, engine=engine, answer_tokens=workload.answer_tokens, **fields)

        plain = run("plain", phase("plain", turns=before))
        returning = phase("cold", turns=(workload.turns,), conversations=plain.conversations, one_by_one=True)
        plain.served += run("plain", returning, len(plain.served)).served
        fill = run("fill", phase("fill", turns=before, stack=stack))
        damaged = corrupt_at_rest(stack, engine.engine_spec(), fill.keys_at_rest) if corrupt else 0
        again = run("again", replace(returning, name="again", conversations=fill.conversations, stack=stack))
    return DemoReport(engine, plain, fill, again, damaged, corrupt)
