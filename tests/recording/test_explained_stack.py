"""A real engine over a recorded stack, and the output of `tierkv explain` after failures."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stack_bed import Faults, opened, prompts_of, serve, stack_config

from tierkv.cli.main import cli
from tierkv.recording.entries import short_key
from tierkv.recording.reading import read_entries
from tierkv.testing.faults import corrupt, raise_error

pytest.importorskip("torch")


def recorded(place: Path, **changes: Any) -> dict[str, Any]:
    """Host and disk, and a record."""
    config = stack_config(place, **changes)
    config["tiers"] = config["tiers"][:1]
    return {**config, "record": {"path": str(place / "run.jsonl")}}


def explain(place: Path, *words: str) -> Result:
    """Run the program on the record of ``place``."""
    return CliRunner().invoke(cli, ["explain", "--record", str(place / "run.jsonl"), *words], prog_name="tierkv")


def faulty(place: Path, **changes: Any) -> dict[str, Any]:
    """A recorded stack with fault injection on its disk, which is out of service after two failures."""
    config = recorded(place, **changes)
    config["tiers"][0] |= {"backend": "faulty", "name": "disk", "retries": 0, "breaker_failures": 2}
    return config


def test_a_stack_without_a_record_is_a_plain_one(tmp_path: Path) -> None:
    """Off by default, and free of cost: no thread, no file, no further call."""
    with opened(stack_config(tmp_path)) as stack:
        assert not stack._core._journal.is_kept
        assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-record"]
        assert stack._scheduler.view.watcher is None


def test_the_record_replays_to_the_resident_chunks(tmp_path: Path) -> None:
    """The recorded changes of chunks are complete, and the answers are those of a stack without a record."""
    prompts = prompts_of(21, 6)
    with opened(recorded(tmp_path, host_slots=12)) as stack:
        assert stack._core._journal.is_kept
        answers = serve(stack, prompts)
        assert stack.flush()
        host = {short_key(chunk.key) for chunk in stack._core.wiring.manager._host.slots.visible()}
        on_disk = len(stack._core.wiring.manager.tiers[0].residency)
        assert stack.metrics.counters.entries_dropped == 0
    assert answers == serve(None, prompts)
    entries = list(read_entries(tmp_path / "run.jsonl"))
    held: dict[str, set[str]] = {"host": set(), "disk": set()}
    for entry in entries:
        if entry["is"] == "chunks":
            assert entry["event"] in {"stored", "removed"}
            if entry["event"] == "stored":
                held[entry["tier"]].update(entry["keys"])
            else:
                held[entry["tier"]].difference_update(entry["keys"])
    assert held["host"] == host
    assert len(held["disk"]) == on_disk
    assert max(len(json.dumps(entry)) for entry in entries) < 3000
    states = [entry for entry in entries if entry["is"] == "request"]
    assert {entry["after"] for entry in states} >= {"running", "finished"}
    finished = [entry for entry in entries if entry["is"] == "finished"]
    assert len(finished) == len(prompts)


def test_a_damaged_frame_is_explained_by_request_and_by_key(tmp_path: Path, faults: Faults) -> None:
    """The most common question of users: why was this a miss, although it was stored?"""
    prompts = prompts_of(22, 1)
    config = faulty(tmp_path)
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
        stack.flush()
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("read_into", corrupt(offset=9000), times=1)
        serve(stack, prompts)
        stack.flush()
        assert stack.metrics.counters.chunks_corrupt["disk"]
    output = explain(tmp_path, "--request", "request-0")
    assert output.exit_code == 0, output.output
    for words in ("asked beyond 0 tokens", "ask again", "disk: read", "corrupt", "request request-0 is over"):
        assert words in output.stdout
    entries = json.loads(explain(tmp_path, "--request", "request-0", "--json").stdout)["entries"]
    bad = next(key for entry in entries if entry["is"] == "op end" for key in entry["bad"])
    of_key = explain(tmp_path, "--key", bad[:12])
    assert of_key.exit_code == 0, of_key.output
    assert "disk lost it: a read found it corrupt" in of_key.stdout
    failures = explain(tmp_path, "--last-failures")
    assert "corrupt" in failures.stdout


def test_a_tier_out_of_service_is_explained_with_its_reason(tmp_path: Path, faults: Faults) -> None:
    """A disk that raises: the record has each failed write, and the moment from which the tier was out of service."""
    with opened(faulty(tmp_path), plugins=faults.registry()) as stack:
        faults.last.add("write", raise_error(lambda: OSError("no route to disk")))
        serve(stack, prompts_of(23, 3))
        stack.flush(5)
    output = explain(tmp_path, "--last-failures")
    assert output.exit_code == 0
    assert "failed: OSError: no route to disk" in output.stdout or "no route to disk" in output.stdout
    assert "disk: OUT OF SERVICE" in output.stdout


def test_eviction_is_explained_as_such(tmp_path: Path) -> None:
    """A small host tier evicts chunks for newer ones: no failure, but an answer to "where is it now?"."""
    with opened(recorded(tmp_path, host_slots=12)) as stack:
        serve(stack, prompts_of(24, 6))
        stack.flush()
    chunks = [entry for entry in read_entries(tmp_path / "run.jsonl") if entry["is"] == "chunks"]
    on_disk = {key for entry in chunks if entry["tier"] == "disk" for key in entry["keys"]}
    removed = next(key for entry in chunks if entry["event"] == "removed" for key in entry["keys"] if key in on_disk)
    output = explain(tmp_path, "--key", removed)
    assert "host lost it: evicted, to make room." in output.stdout
    assert "At the end of the record it is in: disk." in output.stdout


@pytest.fixture
def faults() -> Faults:
    """Faults for one test."""
    return Faults()
