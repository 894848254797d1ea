"""``python -m benchmarks NAME...``: run some benchmarks, or ``all`` of them."""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from benchmarks.measure import Settings
from benchmarks.page import benchmarks_page
from benchmarks.record import RecordError, read_record, write_record
from benchmarks.rows import Row, as_json, as_table

BENCHMARKS = {
    "lookup": "one lookup of 8,192 resident chunks, per key",
    "store_cycle": "storing into a full host tier, per key, for every policy",
    "engine_calls": "the worst single call on the engine's thread, at a million chunks with I/O threads busy",
    "chunk_costs": "processor time of the engine's thread per chunk stored, loaded and looked up, over 32 long prompts",
    "step_calls": "function calls on the engine's thread: per lookup, per store, per decode step",
    "decode_step": "a decode step: calls and processor time, alone and inside vLLM beside vLLM's own tiering",
    "cascade": "the share of stored chunks that reach a lower tier that is full",
    "vllm_manager": "store cycle and lookup beside vLLM's own manager, where vLLM is installed",
    "vllm_ab": "one workload through vLLM's own tiering and through both seams of tierkv, where vLLM is installed",
    "sglang": "backup and prefetch beside SGLang's own backend for files, where SGLang is installed",
    "lmcache": "the disk tier beside LMCache's file client, on the same frames, where LMCache is installed",
    "first_token": "first token from disk, alone and in a queue, beside vLLM's own tiering, where vLLM is installed",
    "reset_held": "the worst call and step after a reset of a million held slots, with 10,000 offers, with events",
    "memory": "bytes of the index and the policy per resident chunk",
    "traffic": "deferrals, and bytes read from below for each byte that the engine used",
    "host_copies": "GPU pages into sealed host slots and back, beside memcpy",
    "gpu_copies": "the same with a GPU, beside one pinned copy; where there is CUDA",
    "codecs": "how small codecs make bfloat16 values, and how fast",
    "model_kv": "codecs on the KV of a real model (--model), and what rounding changes in its answers",
    "model_transformers": "a real model (--model) in transformers: its first token computed, from memory, from disk",
    "model_vllm": "a real model (--model) in vLLM by both seams: its first token computed, from memory, from disk",
    "disk": "the disk tier beside raw O_DIRECT, and beside one file per chunk",
    "whole_stack": "eight requests through a stack to the disk, and back cold, beside raw O_DIRECT",
    "lmdb_tier": "the LMDB tier beside raw O_DIRECT and memcpy",
    "object_store": "the object tier on S3 beside a plain HTTP client",
    "valkey_server": "the Valkey tier beside plain sockets, and beside client libraries alone",
    "overload": "more prompts than an engine can run, all in a tier: chunks loaded, and the time until all are served",
    "long_prompt": "worst call for a prompt of 8,192 cold chunks, with up to 50 tiers and with windows",
    "waiting": "asking for up to 10,000 waiting requests in every step: per request, and the worst call",
    "vllm_load": "vLLM under a burst, with prompts of 32,768 tokens, over a small host tier, where vLLM is installed",
    "burst": "160 prompts at once after a restart: tokens that are not computed; also in vLLM, where it is installed",
    "plan_estimate": "times to the first token as `tierkv plan` estimates them, beside the reference engine",
    "replay": "hits and writes of every policy, over a trace (--trace) and made workloads",
    "chunk_sizes": "tokens per chunk: hits that long chunks lose, cost per token of short ones (--trace FILE)",
    "recovery": "opening a disk tier that holds a million chunks",
}
"""Name of a benchmark -> what it measures. Each is a module of that name in one of the wings."""

WINGS = {
    "core": ("lookup", "store_cycle", "engine_calls", "chunk_costs", "step_calls", "cascade", "reset_held", "memory"),
    "models": ("codecs", "model_kv", "model_transformers", "model_vllm"),
    "side_by_side": ("vllm_manager", "vllm_ab", "first_token", "sglang", "lmcache"),
    "stress": ("overload", "long_prompt", "waiting", "burst", "vllm_load"),
    "steps": ("decode_step",),
    "tiers": (
        *("host_copies", "gpu_copies", "disk", "whole_stack"),
        *("lmdb_tier", "object_store", "valkey_server", "recovery"),
    ),
    "workloads": ("traffic", "replay", "plan_estimate", "chunk_sizes"),
}
"""Wing -> the benchmarks in it."""


def main() -> int:
    """Run the named benchmarks. Rows are printed as soon as their benchmark has ended."""
    parser = _parser()
    arguments = parser.parse_args()
    _check_paths(parser, arguments)
    if arguments.record is not None:
        if arguments.quick:
            parser.error("--record with --quick: the figures of a quick run mean nothing; leave one of them out")
        try:
            read_record(arguments.record)
        except RecordError as error:
            parser.error(f"--record: {error}")
    # A checking stack measures its checks.
    os.environ.pop("TIERKV_VALIDATE", None)
    settings = Settings(arguments.quick, arguments.dir, arguments.trace, arguments.model, arguments.slow_down)
    names = list(BENCHMARKS) if "all" in arguments.names else arguments.names
    machine = _machine()
    if not arguments.json:
        sys.stdout.write(f"{machine}\n")
    results: dict[str, list[Row]] = {}
    for name in names:
        wing = next(wing for wing, modules in WINGS.items() if name in modules)
        run: Callable[[Settings], Iterable[Row]] = import_module(f"benchmarks.{wing}.{name}").run
        rows = results[name] = list(run(settings))
        sys.stdout.write(as_json(name, rows) if arguments.json else f"\n== {name}\n{as_table(rows)}")
        sys.stdout.flush()
        if arguments.record is not None and rows:
            write_record(arguments.record, BENCHMARKS, name, rows, machine)
    if arguments.html is not None:
        benchmarks_page(machine, results).write(arguments.html)
    return 0


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, BENCHMARKS))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each figure beside its limit, measured in the same run, on a machine with nothing else to do.",
        epilog="\n".join(f"{name:{width}}  {text}" for name, text in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=[*BENCHMARKS, "all"], metavar="NAME", help="see below; or all")
    parser.add_argument("--json", action="store_true", help="one JSON object per row and line")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with tables and plots")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="also put the rows in the place of those that the file has of them"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: shows that it runs, nothing else")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where temporary files go, up to 3 GiB (default: %(default)s)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace for replay: JSON lines, perhaps in gzip")
    parser.add_argument(
        "--slow-down", type=_factor, default=1.0, metavar="FACTOR", help="multiply the times of the trace (default: 1)"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a real model, as transformers saves it")
    return parser


def _check_paths(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what would end a run in its middle."""
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"--model {arguments.model}: there is no config.json in it; give a folder that transformers saved")
    if arguments.html is not None and not arguments.html.parent.is_dir():
        parser.error(f"--html {arguments.html}: its folder does not exist; create it first")
    if not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: there is no such folder; create it first")
    if arguments.trace is not None and not arguments.trace.is_file():
        parser.error(f"--trace {arguments.trace}: there is no such file; give JSON lines, one per request")


def _factor(text: str) -> float:
    """Read the factor of the trace's times.

    Raises:
        argparse.ArgumentTypeError: it is no finite number above 0.
    """
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0; give a factor such as 100")
    return factor


def _machine() -> str:
    cores = os.cpu_count()
    load = os.getloadavg()[0]
    return f"Python {platform.python_version()}, {platform.machine()}, {cores} cores, load before the run {load:.1f}"


if __name__ == "__main__":
    sys.exit(main())
