"""`tierkv plan`: the table, the JSON, the page, and what it says to wrong input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, look_at
from click.testing import Result
from made_traces import conversations

from tierkv.cli.planning.plan_output import percent
from tierkv.cli.planning.plan_page import POINTS_MAX, thinned

Run = Callable[..., Result]
STACK = '[host]\ncapacity = "{host}KiB"\n[[tiers]]\nbackend = "disk"\npath = "/nowhere"\ncapacity = "{disk}KiB"\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two hundred prompts of conversations, two a second, with lengths and tenants."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * i, "hash_ids": ids, "input_length": 16 * len(ids) - 3, "tenant": f"t{i % 3}"}
        for i, ids in enumerate(conversations(7, 200))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def stacks(tmp_path: Path) -> list[str]:
    """Two stacks, as options."""
    words = []
    for name, disk in (("small", 400), ("large", 40_000)):
        path = tmp_path / f"{name}.toml"
        path.write_text(STACK.format(host=200, disk=disk), encoding="utf-8")
        words += ["--stack", str(path)]
    return words


PRICES = ("--price", "host=3.5", "--price", "disk=0.1", "--price", "engine=1000")
SIZES = ("--prefill", "200", "--chunk-bytes", "4KiB")


def test_a_plan_in_json_has_every_answer(tierkv: Run, trace: Path, stacks: list[str]) -> None:
    """A spreadsheet reads it: hits, times, traffic, prices and what more room brings, per stack."""
    said = tierkv("plan", trace, *stacks, *SIZES, *PRICES, "--more", "1MiB", "--json")
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    small, large = told["stacks"]
    assert told["assumed"]["chunk_tokens"] == 16
    assert (small["stack"], large["stack"], told["best"]) == ("small", "large", "large")
    assert large["hits"] > small["hits"] > 0
    assert large["engines_saved"] == told["without"]["engines"] - large["engines"] > 0
    assert large["ttft_p95_s"] < told["without"]["ttft_p95_s"]
    assert large["price_saved"] == 1000 * large["engines_saved"]
    assert {growth["tier"] for growth in small["growths"]} == {"host", "disk"}
    assert told["left_out"][-1].startswith("The rest of the day. The trace has 1.7 minutes")
    assert small["growths"][1]["line"].startswith("1.00 MiB more on disk: +")
    assert small["tiers"][1]["written"]["peak_minute"] is not None
    assert small["worst_tenant"]["name"] in {"t0", "t1", "t2"}
    assert len(told["left_out"]) >= 5


def test_the_table_answers_in_a_sentence(tierkv: Run, trace: Path, stacks: list[str]) -> None:
    """A reader who looks at one line reads the answer; the next lines say what is not included."""
    said = tierkv("plan", trace, *stacks, *SIZES, *PRICES)
    assert said.exit_code == 0, said.output
    assert "large saves most for its price: " in said.stdout
    assert "in place of" in said.stdout
    assert "more on disk: +" in said.stdout
    assert "Left out:" in said.stdout
    assert "drive writes" in said.stdout


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("--chunk-bytes", "4KiB", "--price", "engine=0.01"), "No stack saves engines for its price; "),
        (
            ("--chunk-bytes", "4KiB", "--speed", "host=1KB", "--speed", "disk=1KB"),
            "all hits are faster to compute than",
        ),
    ],
)
def test_the_answer_praises_no_stack_without_a_reason(
    tierkv: Run, trace: Path, stacks: list[str], sizes: tuple[str, ...], words: str
) -> None:
    """A buyer must not read that one saves most if none pays."""
    prices = ("--price", "host=3.5", "--price", "disk=100000") if "--price" in sizes else ()
    said = tierkv("plan", trace, *stacks[2:], *stacks[:2], "--prefill", "200", *sizes, *prices)
    assert said.exit_code == 0, said.output
    assert words in " ".join(said.stdout.split())
    told = json.loads(tierkv("plan", trace, *stacks, "--prefill", "200", *sizes, *prices, "--json").stdout)
    assert words in told["answer"]


def test_the_smaller_of_equals_is_named(tierkv: Run, trace: Path, stacks: list[str], tmp_path: Path) -> None:
    """A stack that holds all chunks ten times saves no more than one that holds them once."""
    (tmp_path / "huge.toml").write_text(STACK.format(host=200, disk=400_000), encoding="utf-8")
    said = tierkv("plan", trace, "--stack", tmp_path / "huge.toml", *stacks, *SIZES)
    assert said.exit_code == 0, said.output
    assert "large saves as much as huge, with less room: " in " ".join(said.stdout.split())


def test_a_share_of_nothing_has_no_sign() -> None:
    """`-0.0 % hits` reads like a loss."""
    assert percent(-1e-9, 1.0) == "0.0 %"
    assert percent(-0.2, 1.0) == "-20.0 %"


def test_a_plan_as_a_page(tierkv: Run, trace: Path, stacks: list[str], tmp_path: Path) -> None:
    """The page has the tables and plots, and is the same each time."""
    for name in ("one.html", "two.html"):
        said = tierkv("plan", trace, *stacks, *SIZES, "--html", tmp_path / name)
        assert said.exit_code == 0, said.output
        assert f"Report: {tmp_path / name}" in said.stderr
    page = (tmp_path / "one.html").read_text(encoding="utf-8")
    assert "KiB per second" in page, "the unit fits the traffic"
    assert page == (tmp_path / "two.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert "large saves most" in page


def test_a_burst_is_in_the_plot_of_a_long_trace() -> None:
    """A day has more minutes than a plot has points: the minute for which a drive is bought must be among them."""
    quiet = dict.fromkeys(range(0, 10_000, 7), 5) | {4321: 900}
    points = thinned(quiet)
    assert len(points) <= POINTS_MAX
    assert max(size for _, size in points) == 900
    assert points[0] == (0.0, 5)
    assert [minute for minute, _ in points] == sorted(minute for minute, _ in points)
    assert thinned({3: 1, 5: 2}) == [(3.0, 1), (4.0, 0), (5.0, 2)]
    assert thinned({}) == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (apt-get install chromium)")
def test_the_page_is_whole_in_a_browser(tierkv: Run, trace: Path, stacks: list[str], tmp_path: Path) -> None:
    """No request, no error, no label outside of its plot, and no table that has to be moved on a desk."""
    tierkv("plan", trace, *stacks, *SIZES, *PRICES, "--html", tmp_path / "plan.html")
    seen = look_at(tmp_path / "plan.html", tmp_path, width=1280)
    assert seen.facts["tables_that_scroll"] == 0
    assert not seen.console
    assert not seen.facts["requests"]
    assert not seen.facts["texts_outside"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--speed", "disk"], "give a speed such as disk=3GB,0.2ms"),
        (["--speed", "disk=3GB,fast"], "'fast' is no time: write it in us, ms or s"),
        (["--speed", "disk=three"], "give a speed such as disk=3GB,0.2ms"),
        (["--speed", "disk=6"], "'disk=6': '6' has no unit; give a speed such as disk=3GB,0.2ms"),
        (["--speed", "disk=6.5/s"], "'6.5' has no unit"),
        (["--price", "disk=cheap"], "'disk=cheap' is no price; give one such as disk=0.08, per GiB"),
        (["--price", "host=1"], "there is no price of tier 'disk': add --price disk=PRICE"),
        (["--price", "dsk=1"], "--price dsk=...: no stack has such a tier or backend"),
        (["--speed", "dsk=1GB"], "--speed dsk=...: no stack has such a tier or backend"),
        (["--price", "dsk=1", "--price", "disk=1"], "names: disk, engine, host"),
        (["--prefill", "0"], "0"),
        (["--prefill", "1e-300"], "is not in the range x>=0.001"),
        (["--prefill", "2k"], "'2k' is no number"),
        (["--prefill", "nan"], "'nan': give a finite number"),
        (["--prefill", "inf"], "'inf': give a finite number"),
        (
            ["--html", "/nowhere/at/all.html"],
            "/nowhere/at/all.html: name a file in a folder that exists and may be written to",
        ),
    ],
)
def test_wrong_options_are_told(tierkv: Run, trace: Path, stacks: list[str], words: list[str], answer: str) -> None:
    """One message with the value and the fix, exit code 2, no traceback."""
    said = tierkv("plan", trace, *stacks, *SIZES, *words)
    assert said.exit_code == 2
    assert answer in said.stderr
    assert "Traceback" not in said.output


def test_the_size_of_a_chunk_is_asked_for_with_its_sources(tierkv: Run, trace: Path, stacks: list[str]) -> None:
    """A user does not know the bytes of a chunk by heart."""
    said = tierkv("plan", trace, *stacks, "--prefill", "200")
    assert said.exit_code == 2
    words = " ".join(said.stderr.split())
    assert "Missing option '--chunk-bytes'" in words
    assert "`tierkv trace RECORD` prints" in words


def test_a_trace_without_lengths_needs_the_length_of_a_chunk(tierkv: Run, stacks: list[str], tmp_path: Path) -> None:
    """The message names the option; with it, the plan is made."""
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 3, encoding="utf-8")
    said = tierkv("plan", bare, *stacks, *SIZES)
    assert (said.exit_code, "add --chunk-tokens, such as 512" in said.stderr) == (2, True)
    assert tierkv("plan", bare, *stacks, *SIZES, "--chunk-tokens", 16).exit_code == 0


def test_a_trace_without_requests_gives_no_plan(tierkv: Run, stacks: list[str], tmp_path: Path) -> None:
    """A plan of zeros would read like an answer; so would a comparison of policies."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("", encoding="utf-8")
    for words in (["plan", empty, *stacks, *SIZES, "--html", tmp_path / "empty.html"], ["replay", empty]):
        said = tierkv(*words)
        assert (said.exit_code, "no request is in it" in said.stderr) == (2, True)
    assert not (tmp_path / "empty.html").exists()
    empty.write_text('{"timestamp": 0, "hash_ids": [1, 2, 3]}\n', encoding="utf-8")
    for words in (["plan", empty, *stacks, *SIZES], ["replay", empty]):
        said = tierkv(*words, "--chunks-max", 2)
        assert (said.exit_code, "raise --chunks-max" in said.stderr) == (2, True)


def test_stacks_of_one_file_name_are_told_apart(tierkv: Run, trace: Path, tmp_path: Path) -> None:
    """Candidates are often in folders of their own, each with a stack.toml."""
    words = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stack.toml").write_text(STACK.format(host=200, disk=400), encoding="utf-8")
        words += ["--stack", tmp_path / name / "stack.toml"]
    told = json.loads(tierkv("plan", trace, *words, *SIZES, "--json").stdout)
    assert [one["stack"] for one in told["stacks"]] == [str(word) for word in words[1::2]]
