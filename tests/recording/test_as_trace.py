"""A record as a trace: one's own traffic, played again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from stack_bed import CHUNK_TOKENS, opened, prompts_of, serve, stack_config

from tierkv.cli.main import cli
from tierkv.recording.as_trace import trace_of
from tierkv.recording.reading import read_entries
from tierkv.replay.trace import load_trace

ENTRY = {"step": 1, "t": 0.5}


def head(opened_at: str = "2026-11-24T10:00:00Z", pid: int = 1) -> dict[str, Any]:
    """First line of a process."""
    stack = {"tiers": ["host"], "model": "m", "chunk_tokens": 16, "chunk_bytes": 4096}
    return {**ENTRY, "is": "record", "opened": opened_at, "pid": pid, **stack}


def prompt(request: str, keys: list[str], **fields: Any) -> dict[str, Any]:
    """A prompt's first entry."""
    return {**ENTRY, "is": "prompt", "r": request, "at": 0, "keys": keys, "asked": 0.25, "tokens": 40} | fields


def run(*words: object) -> Result:
    """The program, in this process."""
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="tierkv")


def test_recorded_traffic_finds_in_a_replay_what_it_found(tmp_path: Path) -> None:
    """A planner trusts a replay of the own traffic: it must say of today's stack what today's stack did."""
    pytest.importorskip("torch")
    prompts = prompts_of(5, 6)
    config = {**stack_config(tmp_path), "record": {"path": str(tmp_path / "run.jsonl")}}
    loaded: dict[str, int] = {}
    for _ in range(2):  # each engine begins with an empty pool of GPU blocks
        with opened(config) as stack:
            serve(stack, prompts)
            stack.flush()
            for tier, tokens in stack.metrics.counters.tokens_loaded.items():
                loaded[tier] = loaded.get(tier, 0) + tokens
    said = run("trace", tmp_path / "run.jsonl", "--output", tmp_path / "trace.jsonl.gz")
    assert said.exit_code == 0, said.output
    assert f"12 requests. A chunk has {CHUNK_TOKENS} tokens" in said.stderr
    trace = load_trace(tmp_path / "trace.jsonl.gz")
    assert len(trace) == 12
    assert list(trace.input_tokens) == [120] * 12
    assert list(trace.output_tokens) == [8] * 12
    assert len(trace.chunks) == 12 * (120 // CHUNK_TOKENS)
    first, second = trace.chunks[: len(trace.chunks) // 2], trace.chunks[len(trace.chunks) // 2 :]
    assert first == second
    (tmp_path / "stack.json").write_text(json.dumps({**config, "record": {}}), encoding="utf-8")
    played = run(
        "replay", tmp_path / "trace.jsonl.gz", "--stack", tmp_path / "stack.json", "--chunk-bytes", 8192, "--json"
    )
    assert played.exit_code == 0, played.output
    (stack_json,) = json.loads(played.stdout)["stacks"]
    assert stack_json["hits"] * CHUNK_TOKENS >= sum(loaded.values()) > 0


def test_times_tenants_hints_and_lengths(tmp_path: Path) -> None:
    """Arrivals follow the wall clock over restarts; what a policy may use is kept; a digest identifies the tenant."""
    entries = [
        head(),
        prompt("a", ["aa.0", "bb.0"], tenant="0102", hints={"session": "s", "priority": 3}),
        {**ENTRY, "is": "finished", "r": "a", "account": {}, "generated": 7},
        head("2026-11-24T10:01:00Z", pid=2),
        prompt("b", ["aa.0"], adapter="ff"),
        prompt("c", ["aa.0"], asked=0.125),
        {**ENTRY, "is": "lost", "entries": 4},
    ]
    trace = trace_of(entries)
    a, c, b = trace.lines
    assert (a["timestamp"], b["timestamp"], c["timestamp"]) == (250, 60_250, 60_125)
    assert a["output_length"] == 7
    assert (a["tenant"], a["session"], a["hints"]) == ("0102", "s", {"priority": 3})
    assert b["hash_ids"] == ["aaff"]
    assert c["hash_ids"] == ["aa"]
    assert trace.lost == 4
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in trace.lines), encoding="utf-8")
    assert len(load_trace(path)) == 3


def test_two_stacks_of_one_second_are_told_apart() -> None:
    """A process opens its stack again at once: the second stack's requests come after the first's, not among them."""
    first = [head("2026-11-24T10:00:00.100Z"), prompt("a", ["aa.0"], asked=0.5), prompt("b", ["bb.0"], asked=0.6)]
    again = [head("2026-11-24T10:00:00.900Z"), prompt("a", ["cc.0"], asked=0.05)]
    assert [line["hash_ids"] for line in trace_of([*first, *again]).lines] == [["aa"], ["bb"], ["cc"]]


def test_a_prompt_with_a_gap_ends_before_it() -> None:
    """A record may lack entries: keys after them would make a wrong prompt."""
    whole = [prompt("a", ["aa.0"]), {**ENTRY, "is": "prompt", "r": "a", "at": 1, "keys": ["bb.0"]}]
    gap = [prompt("b", ["aa.0"]), *({**ENTRY, "is": "prompt", "r": "b", "at": i, "keys": ["cc.0"]} for i in (5, 6))]
    headless = [{**ENTRY, "is": "prompt", "r": "x", "at": 32, "keys": ["dd.0"]}]
    trace = trace_of([head(), *whole, head(), *gap, *headless])
    assert [line["hash_ids"] for line in trace.lines] == [["aa", "bb"], ["aa"]]
    assert trace.cut == 1


def test_errors_of_the_command(tmp_path: Path) -> None:
    """No record, no request in it, no folder for the output: one message, no traceback."""
    record = tmp_path / "run.jsonl"
    said = run("trace", record)
    assert (said.exit_code, "there is no such record" in said.stderr) == (2, True)
    record.write_text(json.dumps(head()) + "\n", encoding="utf-8")
    said = run("trace", record)
    assert (said.exit_code, "no request is in this record" in said.stderr) == (2, True)
    record.write_text(json.dumps(head()) + "\n" + json.dumps(prompt("a", ["aa.0"])) + "\n", encoding="utf-8")
    said = run("trace", record, "--output", tmp_path / "absent" / "x.jsonl")
    assert (said.exit_code, "name a file in a folder that exists" in said.stderr) == (2, True)
    said = run("trace", record, "--output", tmp_path / "x.jsonl.zst")  # was written without compression
    assert (said.exit_code, "end the name with .jsonl or .jsonl.gz" in said.stderr) == (2, True)
    assert json.loads(run("trace", record).stdout)["hash_ids"] == ["aa"]
    said = run("replay", record)
    assert (said.exit_code, "`tierkv trace` turns it into a trace" in said.stderr) == (2, True)
    assert len(list(read_entries(record))) == 2
