"""The sessions ``exhaust`` and ``soak``: they work, and their oracles find what they are for."""

from __future__ import annotations

import json

import pytest

from harness.soak import SAMPLES_MIN, Samples
from harness.test_crash import run_program


@pytest.mark.parametrize("backend", ["disk", "fsspec", "lmdb"])
def test_a_tier_writes_again_after_a_cause(backend: str) -> None:
    """The session plays every cause; this says that one works for each backend."""
    done = run_program("harness", "exhaust", "--backend", backend, "--cause", "read-only", "--json")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (total,) = json.loads(done.stdout)
    assert total["skipped"] or total["slowest_heal_s"] > 0


@pytest.mark.parametrize(("name", "finding"), [("never-ends", "no write succeeds"), ("silent", "health says writable")])
def test_an_oracle_finds(name: str, finding: str) -> None:
    """A tier that never writes again, and a health that does not say that nothing is written, are found."""
    done = run_program("harness.broken_targets", name)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    assert finding in done.stdout


def test_a_short_soak_runs() -> None:
    """Growth is judged in longer runs only; wrong bytes, log lines and healing in each."""
    done = run_program("harness", "soak", "--minutes", "0.1", "--json")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout)["chunks stored"] > 0


@pytest.mark.parametrize("name", ["memory_bytes", "objects", "descriptors", "threads", "pending"])
def test_growth_is_found(name: str) -> None:
    """A leak of each kind is named; noise and a flat line are none."""
    samples = Samples()
    for row in samples.rows.values():
        row.extend(1000.0 + number % 5 for number in range(SAMPLES_MIN))
    assert samples.leaks() == []
    samples.rows[name] = [1e6 * number for number in range(SAMPLES_MIN)]
    assert [leak.partition(" ")[0] for leak in samples.leaks()] == [name]


@pytest.mark.parametrize("program", ["exhaust", "soak"])
def test_help_is_the_manual(program: str) -> None:
    """It has examples that can be pasted."""
    assert f"python -m nox -s {program}" in run_program("harness", program, "--help").stdout
