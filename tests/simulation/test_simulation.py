"""The simulation itself: it is deterministic, reaches every part, and reports failures that can be reproduced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import SCENARIOS, Violation, simulate
from simulation.__main__ import main
from simulation.report import PROGRESS_S, Progress, story, summary, total

REACHED = (
    "attachments_refused", "cascades", "cascades_dropped", "chunks_corrupt", "chunks_loaded", "chunks_stored",
    "deadlines_expired", "deferrals", "demotions", "demotions_dropped", "evictions", "loads_failed",
    "loads_streamed", "lookups",
    "offers", "probes", "promotions", "reads_failed", "requests_finished", "resets_refused", "stores_refused",
    "tiers_attached", "tiers_detached", "tiers_emptied", "tokens_computed", "tokens_loaded", "writes_failed",
)  # fmt: skip
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_all_promises_hold_in(scenario: str) -> None:
    """A few runs of each kind with every test run; `nox -s simulate` plays many more."""
    for seed in (101, 202):
        outcome = simulate(seed, scenario=scenario, steps=120)
        assert outcome.finding is None, story(outcome)


def test_a_chunk_that_is_chosen_after_its_use_may_stay() -> None:
    """Above a quota a chunk is released, chosen, and wanted again within a step: nothing of the core is wrong."""
    outcome = simulate(700722, scenario="demotions", steps=45)
    assert outcome.finding is None, story(outcome)


def test_a_chunk_may_begin_with_what_another_one_was_rounded_to() -> None:
    """The GPU has the front of a chunk from another one, of the same tokens, that a lossy tier returned."""
    outcome = simulate(1000874, scenario="cramped")
    assert outcome.finding is None, story(outcome)


def test_a_hung_write_of_a_tier_that_left_is_not_its_followers() -> None:
    """It says nothing about a frame that the tier of the same name gets after a reset: nothing of the core is wrong."""
    outcome = simulate(1000665, scenario="changes", steps=95)
    assert outcome.finding is None, story(outcome)


def test_a_seed_decides_everything() -> None:
    """A failure must be reproducible, also in another process with other hashes."""
    command = [sys.executable, "-m", "simulation", "--seeds", "4", "--steps", "80", "--json"]
    digests = []
    for _ in range(2):
        done = subprocess.run(
            command, check=True, capture_output=True, cwd=TESTS, env={**os.environ, "PYTHONHASHSEED": "random"}
        )
        digests.append([outcome["digest"] for outcome in json.loads(done.stdout)["outcomes"]])
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4


def test_runs_reach_what_they_are_about() -> None:
    """Runs that never load, defer, drop, evict, fail, restart or expire anything would prove nothing."""
    totals = total(simulate(seed, steps=150) for seed in range(12, 36))
    assert not {name for name in REACHED if not totals[name]}
    assert totals["processes"] > 24
    assert totals["tokens_loaded"] > totals["tokens_computed"] / 4  # loading is the rarer, and the harder half


def test_it_tells_what_it_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A report names the seed, the step, the promise, the notes before it, and the command that reproduces it."""
    monkeypatch.setattr("simulation.checks.checks.Checks._check_bounds", _broken)
    assert main(["--seeds", "2", "--first", "7", "--fail-fast", "--jobs", "1"]) == 1
    said = capsys.readouterr()
    assert "seed 7 broke at step 1: made up" in said.err
    assert "open process 0" in said.err
    assert "python -m nox -s simulate -- --seed 7 --scenario" in said.err
    assert "failed seeds: 7" in said.out
    assert main(["--seed", "7", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["failed"] == [7]
    assert document["outcomes"][0]["finding"]["invariant"] == "made up"


def _broken(_self: object) -> None:
    raise Violation("made up", "to see it reported")


def test_good_news_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status and a few counts are all that CI needs."""
    assert main(["--seed", "3", "--steps", "20", "--scenario", "calm"]) == 0
    said = capsys.readouterr()
    assert "1 seeds, 0 failed" in said.out
    assert not said.err


def test_processes_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds are played on all processors, and reported in their order, as if they were played one after the other."""
    said = []
    for jobs in ("1", "2"):
        assert main(["--seeds", "3", "--steps", "20", "--jobs", jobs, "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert [outcome["seed"] for outcome in json.loads(said[0])["outcomes"]] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--scenario", "sunny"], ["--steps", "-1"]])
def test_bad_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error must not play another scenario."""
    with pytest.raises(SystemExit) as refusal:
        main(wrong)
    assert refusal.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_a_log_gets_a_line_a_minute() -> None:
    """A run of a night must show in its log how far it is: a bar is for terminals only."""
    lines: list[str] = []
    now_s = [0.0]
    progress = Progress(4000, lines.append, lambda: now_s[0])
    outcome = simulate(3, steps=10, scenario="calm")
    for passed_s in (1.0, PROGRESS_S - 1.0, 1.0, PROGRESS_S):
        now_s[0] += passed_s
        progress.add(outcome)
    assert lines == [
        f"2 of 4,000 seeds, 0 failed, {2 * outcome.steps} steps, {2 * outcome.steps / PROGRESS_S:,.0f} a second\n",
        f"4 of 4,000 seeds, 0 failed, {4 * outcome.steps} steps, {4 * outcome.steps / 121:,.0f} a second\n",
    ]


def test_outcomes_of_good_runs_have_no_story() -> None:
    """A passing run prints no story."""
    outcome = simulate(3, steps=10, scenario="calm")
    assert story(outcome) == "seed 3: all held"
    assert "0 failed" in summary([outcome])
