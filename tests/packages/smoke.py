"""The main job of installed distributions: ``python -I smoke.py tierkv tierkv-disk ...``.

It imports nothing but what is installed, and ends with the first thing that is wrong. For each distribution it looks at
version, license, type marker, entry points and commands. Each backend that needs no server stores a chunk, is closed,
and returns the same bytes to a second stack.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

import tierkv
from tierkv import EngineSpec, GroupSpec, ScheduledRequest, Stack, StepOutput
from tierkv.cli.main import cli

BLOCK_TOKENS, LAYERS, PAGE_BYTES, BLOCKS = 16, 2, 4096, 4
SPEC = EngineSpec(
    "smoke", "float32", (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,) * LAYERS),), hash_block_tokens=BLOCK_TOKENS
)
HOST = {"host": {"capacity": "1MiB"}, "chunk": {"blocks": 2}}
SERVED = {"valkey"}
"""Backends that need a server: they are listed, and their own tests start one."""
ANSWER_S_MAX = 60
"""A lookup that is still deferred then will not be answered."""


@dataclass
class Prompt:
    """A request as tierkv reads it, with chained hashes."""

    request_id: str
    num_prompt_tokens: int = BLOCKS * BLOCK_TOKENS
    kv_transfer_params: dict[str, Any] | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        for _ in range(BLOCKS):
            self.block_hashes.append(hashlib.blake2b(b"".join(self.block_hashes), digest_size=32).digest())


@dataclass
class Block:
    """A block of the engine whose content is not computed yet."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def tier_of(backend: str, place: Path) -> dict[str, Any]:
    """A tier of a backend that needs no server."""
    if backend == "fsspec":
        return {"backend": backend, "url": (place / backend).as_uri()}
    return {"backend": backend, "path": str(place / backend), "capacity": "64MiB"}


def opened(tiers: list[dict[str, Any]]) -> tuple[Stack, list[np.ndarray]]:
    """A stack over the tiers, and the engine's KV cache: empty pages."""
    stack = tierkv.open_stack({**HOST, "tiers": tiers}, SPEC)
    pages = [np.zeros((3 * BLOCKS, PAGE_BYTES), dtype=np.uint8) for _ in range(LAYERS)]
    stack.worker.register_kv_caches([pages])
    return stack, pages


def step(stack: Stack, output: StepOutput | None = None) -> Any:
    """One step of the engine; returns the report of its transfers."""
    meta = stack.build_connector_meta(output or StepOutput())
    stack.worker.start_step(meta)
    stack.worker.queue_stores(meta)
    return stack.update_connector_output(stack.worker.get_finished())


def answer(stack: Stack, prompt: Prompt) -> int:
    """Tokens that the stack has of a prompt; a deferred lookup is repeated."""
    stack.on_new_request(prompt)
    end = time.monotonic() + ANSWER_S_MAX
    tokens, _ = stack.get_num_new_matched_tokens(prompt, 0)
    while tokens is None:
        demand(time.monotonic() < end, f"no answer to a lookup in {ANSWER_S_MAX} s")
        step(stack)
        time.sleep(0.001)
        tokens, _ = stack.get_num_new_matched_tokens(prompt, 0)
    return tokens


def store(stack: Stack, pages: list[np.ndarray], content: np.ndarray) -> None:
    """Compute a prompt: write its content into blocks, and store them."""
    prompt, blocks = Prompt("stores"), tuple(range(1, BLOCKS + 1))
    demand(answer(stack, prompt) == 0, "an empty stack has the prompt")
    stack.update_state_after_alloc(prompt, [[Block(number) for number in blocks]], 0)
    for layer, layer_pages in enumerate(pages):
        layer_pages[list(blocks)] = content[layer]
    row = ScheduledRequest(prompt.request_id, 0, prompt.num_tokens, (blocks,), replaces_table=True)
    step(stack, StepOutput(scheduled=(row,)))
    stack.request_finished(prompt, [list(blocks)])
    while stack.has_pending_work():
        step(stack)
    stack.flush()


def load(stack: Stack, pages: list[np.ndarray]) -> tuple[int, np.ndarray]:
    """Ask for the prompt again: the tokens that are found, and what is loaded into other blocks."""
    prompt, blocks = Prompt("loads"), list(range(BLOCKS + 1, 2 * BLOCKS + 1))
    tokens = answer(stack, prompt)
    stack.update_state_after_alloc(prompt, [[Block(number) for number in blocks]], tokens)
    while tokens:
        report = step(stack)
        demand(not report.invalid_block_ids, f"the load failed for the blocks {report.invalid_block_ids}")
        if prompt.request_id in report.finished:
            break
    stack.request_finished(prompt, [blocks])
    return tokens, np.stack([layer_pages[blocks] for layer_pages in pages])


def demand(holds: object, problem: str) -> None:
    """End the program with a problem, unless a condition holds."""
    if not holds:
        sys.exit(f"smoke test: {problem}")


def check_round_trip(backend: str, place: Path) -> None:
    """A backend returns a chunk bit for bit to a second stack; without a backend, host memory returns it."""
    tiers = [tier_of(backend, place)] if backend != "host" else []
    content = np.random.default_rng(7).integers(0, 256, (LAYERS, BLOCKS, PAGE_BYTES), dtype=np.uint8)
    stack, pages = opened(tiers)
    store(stack, pages, content)
    if tiers:
        demand(stack.close(), f"{backend} did not keep all that was stored")
        stack, pages = opened(tiers)
    tokens, loaded = load(stack, pages)
    stack.close()
    demand(tokens == BLOCKS * BLOCK_TOKENS, f"{backend} returned {tokens} of {BLOCKS * BLOCK_TOKENS} tokens")
    demand((loaded == content).all(), f"{backend} returned other bytes")


def check_files(name: str) -> list[str]:
    """License, type marker and entry points of a distribution; returns the names of its plugins."""
    found = distribution(name)
    files = [str(path) for path in found.files or ()]
    demand(any(path.endswith("licenses/LICENSE") for path in files), f"{name} has no LICENSE")
    package = find_spec(name.replace("-", "_"))
    demand(
        package and package.origin and Path(package.origin).with_name("py.typed").is_file(), f"{name} has no py.typed"
    )
    demand(found.metadata["License-Expression"] == "Apache-2.0", f"{name} states no license")
    for entry in found.entry_points:
        demand(entry.group != "tierkv" or entry.load(), f"{name}: {entry.value} cannot be loaded")
    return [entry.name for entry in found.entry_points if entry.group == "tierkv"]


def program(*arguments: str) -> str:
    """Output of the ``tierkv`` program of this environment."""
    command = [str(Path(sys.executable).with_name("tierkv")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S_MAX)
    demand(done.returncode == 0, f"`tierkv {' '.join(arguments)}` failed: {done.stdout}{done.stderr}")
    return done.stdout


def check_program(names: list[str], backends: list[str], place: Path) -> None:
    """The program states its version, lists the backends, and accepts a stack of all of them."""
    version = distribution("tierkv").version
    demand(version in program("--version"), f"`tierkv --version` does not say {version}")
    listed = json.loads(program("plugins", "--json"))
    demand(not listed["broken"], f"broken plugins: {listed['broken']}")
    rows = [row for row in listed["plugins"] if row["kind"] == "backend" and row["distribution"] in names]
    demand({row["name"] for row in rows} >= set(backends), f"`tierkv plugins` does not list all of {backends}")
    tiers = [tier_of(name, place) for name in backends if name not in SERVED]
    stack = place / "stack.yaml"  # JSON is YAML
    stack.write_text(json.dumps({**HOST, "tiers": tiers}), encoding="utf-8")
    demand(json.loads(program("check", str(stack), "--json"))["ok"], "`tierkv check` refuses the stack")
    context = click.Context(cli, info_name="tierkv")
    for name in cli.list_commands(context):  # each is imported when it is first asked for
        command = cli.get_command(context, name)
        demand(command and command.get_help(context), f"`tierkv {name}` has no help")


def main(names: list[str]) -> None:
    """Check the named distributions of this environment."""
    backends = [backend for name in names for backend in check_files(name)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        check_program(names, backends, place)
        stored = ["host", *(backend for backend in backends if backend not in SERVED)]
        for backend in stored:
            check_round_trip(backend, place)
    sys.stdout.write(f"stored and returned by {', '.join(stored)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
