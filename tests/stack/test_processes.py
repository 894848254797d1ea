"""Promises that only a second process can test: kill -9, and two engines over one shared storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stack_bed import ENGINE, opened, prompts_of, serve, stack_config

pytestmark = pytest.mark.needs_torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"

SERVE_FOR_EVER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from stack_bed import ENGINE, opened, prompts_of, stack_config
from tierkv.reference.engine import Engine
from tierkv.types.cache_events import CacheEventKind

with opened(stack_config(Path(sys.argv[2]))) as stack:
    engine = Engine(ENGINE, connector=stack)
    for seed in range(10_000):
        for i, prompt in enumerate(prompts_of(seed, 3)):
            engine.add_request(prompt, 8, request_id=f"{seed}/{i}")
        while engine.has_unfinished:
            for event in engine.step().events:
                if event.kind is CacheEventKind.STORED and event.tier == "disk":
                    print(*(key.hex() for key in event.keys), flush=True)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that runs ``script``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", script, str(SUPPORT), *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_kill_minus_nine_loses_nothing_that_was_acknowledged(
    tmp_path: Path, expected: Callable[..., list[list[int]]]
) -> None:
    """An acknowledged chunk is kept: the engine got "stored on disk", died at once, and the next engine finds it."""
    process = start(SERVE_FOR_EVER, str(tmp_path))
    assert process.stdout is not None
    acknowledged: list[str] = []
    while len(acknowledged) < 40:
        acknowledged += process.stdout.readline().split()
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    acknowledged += rest.split()
    with opened(stack_config(tmp_path)) as stack:
        assert serve(stack, prompts_of(0, 3)) == expected(prompts_of(0, 3))
        assert stack.metrics.counters.tokens_loaded["disk"] >= 112 + 2 * 72
        assert not stack.metrics.counters.chunks_corrupt
        assert stack.metrics.counters.tokens_loaded.keys() == {"disk"}
        manager = stack._core.wiring.manager
        disk = manager.tiers[0]
        missing = [key for key in acknowledged if bytes.fromhex(key) not in set(disk.residency)]
        assert not missing


SERVE_ONCE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from stack_bed import opened, prompts_of, serve, stack_config

config = stack_config(Path(sys.argv[2]))
config["tiers"] = [config["tiers"][1]]
config["tiers"][0]["absence_ttl_s"] = 0.0
with opened(config) as stack:
    print("ready", flush=True)
    for line in sys.stdin:
        answers = serve(stack, prompts_of(int(line), 3))
        stack.flush()
        print(answers, sum(stack.metrics.counters.tokens_loaded.values()), sep="|", flush=True)
"""


def test_two_engines_share_a_place(tmp_path: Path, expected: Callable[..., list[list[int]]]) -> None:
    """Engines share chunks by a shared tier: one process loads what another, already running, stored."""
    engines = [
        subprocess.Popen(
            [sys.executable, "-I", "-c", SERVE_ONCE, str(SUPPORT), str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]  # fmt: skip

    def ask(number: int, seed: int) -> tuple[str, int]:
        engine = engines[number]
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(f"{seed}\n")
        engine.stdin.flush()
        answers, loaded = engine.stdout.readline().split("|")
        return answers, int(loaded)

    for engine in engines:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
    first, second = ask(0, 21), ask(1, 21)
    assert first == (str(expected(prompts_of(21, 3))), 0)
    assert second[0] == first[0]
    assert second[1] >= 112 + 2 * 72
    for engine in engines:
        engine.communicate()
        assert engine.returncode == 0


def test_the_bed_is_what_it_says() -> None:
    """The numbers above depend on these: 16-token chunks, prompts of 120 tokens of which 40 are shared."""
    assert ENGINE.block_tokens * 2 == 16
    first, second = prompts_of(0, 2)
    assert len(first) == 120
    assert first[:40] == second[:40]
    assert first[40] != second[40] or first[41:] != second[41:]
