"""`tierkv replay`: the planner's table and JSON, and what it says to wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tierkv.plugins.loading import load_plugins

Run = Callable[..., Result]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A hundred prompts, of which every second one came before; 151 different chunks."""
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * i, "hash_ids": [0, 1 + i // 2, 1000 + i]} for i in range(100)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_every_policy_stands_between_the_bounds(tierkv: Run, trace: Path) -> None:
    """A planner reads one column: all that is installed, with the least and the most beside it."""
    said = tierkv("replay", trace, "--capacity", "1k", "--capacity", 20, "--json")
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert (told["requests"], told["chunks"], told["distinct_chunks"]) == (100, 300, 151)
    results = {(row["policy"], row["capacity_chunks"]): row for row in told["results"]}
    assert set(results) == {
        (name, size) for name in [*load_plugins().policies, "fifo", "belady"] for size in (20, 1000)
    }
    for (_, size), row in results.items():
        assert row["hit_percent"] == pytest.approx(100 * row["hits"] / 300)
        assert row["hits"] <= results["belady", size]["hits"]
        assert row["capacity_bytes"] is None
    assert results["lru", 1000]["hits"] == 99 + 50
    assert results["lru", 1000]["writes"] == 151


def test_the_table_names_capacities_in_chunks_and_bytes(tierkv: Run, trace: Path) -> None:
    """Users buy memory by the byte, not by the chunk."""
    said = tierkv("replay", trace, "--policy", "lru", "--capacity", "2048", "--chunk-bytes", "2MiB")
    assert said.exit_code == 0, said.output
    assert "2,048 (4.00 GiB)" in said.stdout
    assert "49.7" in said.stdout
    assert "s3-fifo" not in said.stdout


def test_capacities_follow_the_trace(tierkv: Run, trace: Path) -> None:
    """With only a trace, a user needs the shape of the curve before choosing numbers."""
    said = tierkv("replay", trace, "--policy", "lru", "--json")
    sizes = {row["capacity_chunks"] for row in json.loads(said.stdout)["results"]}
    assert max(sizes) == 151
    assert len(sizes) >= 5


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--policy", "lur"], "lru"),
        (["--capacity", "0"], "'0' is no number of chunks; give one such as 3000, 30k or 1m"),
        (["--capacity", "many"], "'many' is no number of chunks"),
        (["--chunk-bytes", "2 apples"], "2 apples"),
    ],
)
def test_wrong_options_are_told(tierkv: Run, trace: Path, words: list[str], answer: str) -> None:
    """One message with what is allowed, exit code 2, no traceback."""
    said = tierkv("replay", trace, *words)
    assert said.exit_code == 2
    assert answer in said.stderr
    assert "Traceback" not in said.stderr


def test_a_file_that_is_no_trace(tierkv: Run, tmp_path: Path) -> None:
    """The line and the reason, for the author of the converter."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n', encoding="utf-8")
    said = tierkv("replay", path)
    assert said.exit_code == 2
    assert "line 1: hash_ids is missing" in said.stderr


def test_a_policy_that_breaks_is_named(tierkv: Run, trace: Path, break_plugin: Callable[[str], None]) -> None:
    """A plugin's bug must not look like one of the planner."""
    break_plugin(
        "from tierkv.abc import PolicyPlugin\n"
        "@hookimpl\ndef tierkv_policies():\n    return [PolicyPlugin('torn', '', lambda chunks_max: 1 / 0)]\n"
    )
    said = tierkv("replay", trace, "--policy", "torn")
    assert said.exit_code == 2
    assert "policy 'torn' of " in said.stderr
    assert "failed at 1 chunks: ZeroDivisionError" in said.stderr


def test_stacks_are_played_and_reported_by_tier(tierkv: Run, trace: Path, tmp_path: Path) -> None:
    """The tiers that a hit came from decide what it costs; tenants show who gains."""
    lines = [json.loads(line) | {"tenant": f"t{i % 2}"} for i, line in enumerate(trace.read_text().splitlines())]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    stack = tmp_path / "stack.toml"
    stack.write_text(
        '[host]\ncapacity = "64KiB"\n[[tiers]]\nbackend = "disk"\npath = "/nowhere"\ncapacity = "2MiB"\n',
        encoding="utf-8",
    )
    words = ("replay", trace, "--stack", stack, "--chunk-bytes", "4KiB")
    told = json.loads(tierkv(*words, "--json").stdout)
    (played,) = told["stacks"]
    assert [tier["tier"] for tier in played["tiers"]] == ["host", "disk"]
    assert played["hits"] == sum(tier["hits"] for tier in played["tiers"]) == 98
    assert played["tiers"][1]["bytes_written"] == 4096 * played["tiers"][1]["chunks_written"] > 0
    assert [tenant["requests"] for tenant in played["tenants"]] == [50, 50]
    said = tierkv(*words)
    assert said.exit_code == 0, said.output
    assert "all tiers" in said.stdout
    assert "tenants" in said.stdout


def test_chunks_that_no_tier_was_given_are_told(tierkv: Run, trace: Path, tmp_path: Path) -> None:
    """A prompt longer than the host tier is evicted before it is written back: that explains low hits."""
    one = json.loads(trace.read_text().splitlines()[0]) | {"hash_ids": list(range(40))}
    one |= {"input_length": 40 * 512}
    trace.write_text(json.dumps(one) + "\n", encoding="utf-8")
    stack = tmp_path / "stack.toml"
    tier = '[[tiers]]\nbackend = "disk"\npath = "/nowhere"\ncapacity = "2MiB"\nwrite = "back"\n'
    stack.write_text(f'[host]\ncapacity = "64KiB"\n{tier}', encoding="utf-8")
    words = ("replay", trace, "--stack", stack, "--chunk-bytes", "4KiB")
    (played,) = json.loads(tierkv(*words, "--json").stdout)["stacks"]
    host, disk = played["tiers"]
    assert host["chunks_not_written"] == 0
    assert 0 < disk["chunks_not_written"] <= 40 - disk["chunks_written"]
    page = tmp_path / "page.html"
    assert "not written" in tierkv(*words, "--html", page).stdout
    assert "not written" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "--stack needs the size of a chunk"),
        (["--chunk-bytes", "4KiB", "--policy", "lru"], "--stack has its own capacities and policies"),
        (["--chunk-bytes", "1GiB"], "host.capacity = 65536 bytes: a chunk of this trace needs"),
    ],
)
def test_wrong_options_beside_a_stack_are_told(
    tierkv: Run, trace: Path, tmp_path: Path, words: list[str], answer: str
) -> None:
    """Options that contradict a stack are refused, not ignored."""
    stack = tmp_path / "stack.toml"
    stack.write_text('[host]\ncapacity = "64KiB"\n', encoding="utf-8")
    said = tierkv("replay", trace, "--stack", stack, *words)
    assert said.exit_code == 2
    assert answer in said.stderr


def test_a_long_trace_is_cut_and_it_says_so(tierkv: Run, trace: Path, tmp_path: Path) -> None:
    """The bound on memory is visible, with the option that raises it."""
    said = tierkv("replay", trace, "--policy", "lru", "--chunks-max", 30, "--json")
    assert json.loads(said.stdout)["requests"] == 10
    assert "Only the first 10 requests were read; raise --chunks-max" in said.stderr


@pytest.mark.parametrize("words", [("replay",), ("replay", "--stack"), ("plan", "--stack")])
def test_ids_of_single_chunks_are_told(tierkv: Run, trace: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Some published traces number each block by its own content: a replay would promise hits that no engine has."""
    stack, mixed = tmp_path / "stack.toml", tmp_path / "mixed.jsonl"
    stack.write_text('[host]\ncapacity = "64KiB"\n', encoding="utf-8")
    prompts = [[1, 2, 3], [9, 2, 3], [], [2], [1, 2, 3, 4], []]
    lines = [f'{{"timestamp": {at}, "hash_ids": {ids}}}\n' for at, ids in enumerate(prompts)]
    mixed.write_text("".join(lines), encoding="utf-8")
    more = [stack, "--chunk-bytes", "4KiB"] if "--stack" in words else []
    more += ["--chunk-tokens", "16", "--prefill", "100"] if "plan" in words else []
    command, *rest = words
    said = tierkv(command, mixed, *rest, *more)
    assert said.exit_code == 0, said.output
    assert "1 ids follow different ids in different prompts" in said.stderr
    assert "different prompts" not in tierkv(command, trace, *rest, *more).stderr


@pytest.mark.parametrize("words", [("replay",), ("replay", "--stack"), ("plan", "--stack")])
def test_timestamps_in_seconds_are_told(tierkv: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Some published traces count seconds: an hour of traffic would be planned as 3.6 seconds of it."""
    stack, seconds = tmp_path / "stack.toml", tmp_path / "seconds.jsonl"
    stack.write_text('[host]\ncapacity = "64KiB"\n', encoding="utf-8")
    lines = [f'{{"timestamp": {at * 0.5}, "hash_ids": [{at % 7}]}}\n' for at in range(100)]
    seconds.write_text("".join(lines), encoding="utf-8")
    command, *rest = words
    more = [*rest, stack, "--chunk-bytes", "4KiB"] if rest else []
    more += ["--chunk-tokens", "16", "--prefill", "100", "--json"] if command == "plan" else []
    read_as_ms = tierkv(command, seconds, *more)
    assert "2,020 requests per second. If its timestamps are in seconds, add --timestamps s." in read_as_ms.stderr
    read_as_s = tierkv(command, seconds, *more, "--timestamps", "s")
    assert read_as_s.exit_code == 0, read_as_s.output
    assert "requests per second" not in read_as_s.stderr
    if command == "plan":
        assert json.loads(read_as_s.stdout)["span_s"] == pytest.approx(49.5)


def test_a_replay_as_a_page(tierkv: Run, trace: Path, tmp_path: Path) -> None:
    """The curve over capacities says more than a table; stacks are bars by tier."""
    said = tierkv("replay", trace, "--policy", "lru", "--html", tmp_path / "policies.html")
    assert said.exit_code == 0, said.output
    page = (tmp_path / "policies.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "(knows the future)" in page
    stack = tmp_path / "stack.toml"
    stack.write_text('[host]\ncapacity = "64KiB"\n', encoding="utf-8")
    words = ("--stack", stack, "--chunk-bytes", "4KiB", "--html", tmp_path / "stacks.html")
    said = tierkv("replay", trace, *words)
    assert said.exit_code == 0, said.output
    page = (tmp_path / "stacks.html").read_text(encoding="utf-8")
    assert "Chunks found, by tier" in page
    assert "100 requests ask for 300 chunks" in page
