"""`tierkv explain`, its words and its exit codes, on records written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tierkv.recording.entries import matches, short_key
from tierkv.recording.reading import similar_names
from tierkv.types.keys import make_key, make_scope

Run = Callable[..., Result]
A, B, OTHER = "aa11" * 8 + ".0", "aa22" * 8 + ".0", "bb33" * 8 + ".1"


def entries() -> list[dict[str, Any]]:
    """A short day: stored, refused by its deadline, lost."""
    return [
        {"is": "record", "step": 0, "t": 0, "tiers": ["host", "disk"], "model": "m", "pid": 7, "opened": "today"},
        {"is": "answer", "step": 1, "t": 0.1, "r": "chat-1", "local": 0, "tokens": None, "why": "it was asked",
         "chunks": 2, "ready": 1, "wanted": [A, B], "expired": False},
        {"is": "op", "step": 1, "t": 0.2, "op": 4, "tier": "disk", "verb": "read", "keys": [B]},
        {"is": "op end", "step": 2, "t": 0.3, "op": 4, "tier": "disk", "verb": "read", "ok": 0,
         "bad": {B: "timed_out"}, "late": True},
        {"is": "answer", "step": 3, "t": 0.4, "r": "chat-1", "local": 0, "tokens": 16, "why": "", "chunks": 1,
         "ready": 1, "wanted": [A], "expired": True, "missing": B},
        {"is": "chunks", "step": 3, "t": 0.5, "tier": "host", "event": "stored", "keys": [A, OTHER]},
        {"is": "job", "step": 4, "t": 0.6, "r": "chat-2", "job": 9, "store": False, "keys": [OTHER]},
        {"is": "job end", "step": 5, "t": 0.7, "r": "chat-2", "job": 9, "store": False, "failed": [OTHER]},
        {"is": "chunks", "step": 5, "t": 0.8, "tier": "host", "event": "removed", "keys": [OTHER]},
        {"is": "chunks", "step": 6, "t": 0.9, "tier": "host", "event": "cleared", "keys": []},
    ]  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """That day, on disk."""
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries()), encoding="utf-8")
    return path


def test_a_request_is_told_from_its_question_to_its_answer(tierkv: Run, record: Path) -> None:
    """With what the disk did meanwhile, and without what concerned others."""
    said = tierkv("explain", "--record", record, "--request", "chat-1")
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert len(lines) == 6
    assert "ask again, it was asked; 1 of 2 chunks are ready" in lines[1]
    assert "DEADLINE" in lines[3]
    assert f"16 tokens, its DEADLINE has passed, and this is what was ready; missing: {B}" in lines[4]
    assert lines[5] == "The longest operation of a tier was disk, read 4: 0.100 s with its queue."


def states(name: str, *changes: tuple[float, str, str]) -> list[dict[str, Any]]:
    """Changes of a request's state: time, before, after; then its end."""
    rows: list[dict[str, Any]] = [
        {"is": "request", "step": 1, "t": at, "r": name, "event": "e", "before": before, "after": after}
        for at, before, after in changes
    ]
    account = {"loaded_tokens": {"disk": 32}, "stored_tokens": 0}
    return [*rows, {"is": "finished", "step": 9, "t": changes[-1][0], "r": name, "account": account}]


@pytest.fixture
def waits(tmp_path: Path) -> Path:
    """Two requests of a server, with the ids that it makes of its clients'; then another process."""
    opened = {**entries()[0], "opened": "2026-11-24T20:00:00Z"}
    slow = states("cmpl-a-0-1f", (1.0, "idle", "gathering"), (3.0, "gathering", "loading"), (3.5, "loading", "running"),
                  (9.5, "running", "finished"))  # fmt: skip
    quick = states("cmpl-b-0-2f", (4.0, "idle", "running"), (9.0, "running", "finished"))
    killed = states("cmpl-c-0-3f", (7.0, "idle", "asking"), (7.25, "asking", "running"))[:-1]
    path = tmp_path / "waits.jsonl"
    rows = [
        opened,
        *slow,
        *quick,
        *killed,
        {**opened, "opened": "unknown"},
        *states("cmpl-d", (0.1, "idle", "running")),
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    return path


def test_the_time_of_a_request_is_divided(tierkv: Run, waits: Path) -> None:
    """A user asks who made it wait: a tier, the copy, or the engine."""
    said = tierkv("explain", "--record", waits, "--request", "cmpl-a-0-1f").stdout.splitlines()[-1]
    assert said == (
        "In all 8.500 s since its first question (at 2026-11-24T20:00:01.000Z): 6.000 s computing in the engine; "
        "2.000 s reading chunks into host memory; 0.500 s copying to the GPU."
    )


def test_the_longest_operation_of_a_tier_is_named(tierkv: Run, waits: Path) -> None:
    """A request that waited for chunks asks which tier was slow; the lines give two times to subtract."""
    rows = [json.loads(line) for line in waits.read_text(encoding="utf-8").splitlines()]
    read = {"is": "op", "step": 1, "tier": "disk", "verb": "read", "keys": [A]}
    end = {**read, "is": "op end", "ok": 1, "bad": {}, "late": False}
    asked = {"is": "answer", "step": 1, "t": 1.0, "r": "cmpl-a-0-1f", "local": 0, "tokens": None, "why": "",
             "chunks": 1, "ready": 0, "wanted": [A], "expired": False}  # fmt: skip
    rows[2:2] = [asked, {**read, "op": 4, "t": 1.0}, {**read, "op": 5, "t": 1.1}, {**end, "op": 5, "t": 1.2},
                 {**end, "op": 4, "t": 2.9}]  # fmt: skip
    waits.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = tierkv("explain", waits, "--request", "cmpl-a-0-1f").stdout.splitlines()
    assert said[-1] == "The longest operation of a tier was disk, read 4: 1.900 s with its queue."
    assert "longest" not in tierkv("explain", waits, "--request", "cmpl-b-0-2f").stdout


def test_a_request_is_found_by_the_id_that_its_client_has(tierkv: Run, waits: Path) -> None:
    """The engine's own id is in no answer of the server."""
    said = tierkv("explain", "--record", waits, "--request", "cmpl-a", "--json")
    assert {entry["r"] for entry in json.loads(said.stdout)["entries"] if "r" in entry} == {"cmpl-a-0-1f"}
    two = waits.read_text(encoding="utf-8").replace("cmpl-b-0-2f", "cmpl-a-1-2f")  # two prompts in one call
    waits.write_text(two, encoding="utf-8")
    said = tierkv("explain", "--record", waits, "--request", "cmpl-a")
    assert said.exit_code == 1
    assert "Nearest: cmpl-a-0-1f, cmpl-a-1-2f" in said.output


def test_the_slowest_requests_come_first(tierkv: Run, waits: Path) -> None:
    """Slow is what waited before the engine computed; a killed process leaves its requests open."""
    found = json.loads(tierkv("explain", "--record", waits, "--slowest", 3, "--json").stdout)["requests"]
    assert [row["request"] for row in found][:2] == ["cmpl-a-0-1f", "cmpl-c-0-3f"]
    assert [row["before_compute_s"] for row in found] == [2.5, 0.25, 0.0]
    assert found[0]["loaded_tokens"] == {"disk": 32}
    table = tierkv("explain", "--record", waits, "--slowest", 1).stdout
    assert "cmpl-a-0-1f" in table
    assert "2000.0" in table
    assert "cmpl-c" not in table


def test_a_process_that_does_not_say_when_it_began_has_no_clock(tierkv: Run, waits: Path) -> None:
    """A date that is made up would be worse than none."""
    found = json.loads(tierkv("explain", "--record", waits, "--slowest", 9, "--json").stdout)["requests"]
    assert {row["request"]: row["first_question_at"] for row in found}["cmpl-d"] == ""


def test_a_key_is_told_with_the_reason_of_its_loss(tierkv: Run, record: Path) -> None:
    """A chunk whose bytes failed on the way to the GPU was not evicted, and one that a reset took was neither."""
    said = tierkv("explain", "--record", record, "--key", "bb33")
    assert "transfer 9 ended; FAILED" in said.stdout
    assert "step 5: host lost it: its bytes failed the check" in said.stdout
    assert "in: no tier" in said.stdout
    reset = tierkv("explain", "--record", record, "--key", A)
    assert "step 6: host lost it: the cache was reset." in reset.stdout


def test_failures_only(tierkv: Run, record: Path) -> None:
    """Two things went wrong that day."""
    said = tierkv("explain", "--record", record, "--last-failures", "--json")
    assert [entry["is"] for entry in json.loads(said.stdout)["entries"]] == ["record", "op end", "job end"]


def test_a_day_without_failures(tierkv: Run, tmp_path: Path) -> None:
    """Silence would leave the reader wondering."""
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(entries()[0]) + "\n", encoding="utf-8")
    assert "The record has no failures" in tierkv("explain", "--record", path, "--last-failures").stdout


@pytest.mark.parametrize("content", ["", "\n", '{"timestamp": 1, "hash_ids": [1]}\n', "\x00\x01\n"])
@pytest.mark.parametrize("words", [["--last-failures"], ["--last-failures", "--follow"], ["--slowest", "3"]])
def test_a_file_that_is_no_record_is_no_good_news(
    tierkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: list[str]
) -> None:
    """A wrong path in a night of failures: "no failures" would send the operator to bed."""
    monkeypatch.setattr("tierkv.recording.reading.POLL_S", -1)  # a reader that waits fails at once
    path = tmp_path / "run.jsonl"
    path.write_text(content, encoding="utf-8")
    if content or "--follow" not in words:  # an empty one may be about to begin
        said = tierkv("explain", path, *words)
        assert (said.exit_code, "this is no record of a stack" in said.stderr) == (2, True)
        assert "record.path" in said.stderr


@pytest.mark.parametrize("words", [["--last-failures"], ["--last-failures", "--follow"], ["--slowest", "3"]])
def test_a_record_of_another_version_is_refused_by_name(
    tierkv: Run, record: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Its failures may be written in another way: entries that are not understood are no absence of failures."""
    monkeypatch.setattr("tierkv.recording.reading.POLL_S", -1)  # a reader that waits fails at once
    record.write_text(json.dumps({**entries()[0], "version": 99, "tiers": "changed"}) + "\n", encoding="utf-8")
    said = tierkv("explain", record, *words)
    assert said.exit_code == 2
    assert f"{record}: this is a record of version 99, and tierkv" in said.stderr
    assert "reads 1 and 2" in said.stderr


def test_an_older_record_is_read_and_says_what_it_lacks(tierkv: Run, record: Path) -> None:
    """An upgrade goes on in the same file."""
    first = {**entries()[0], "version": 1}
    record.write_text("".join(json.dumps(entry) + "\n" for entry in [first, *entries()[1:]]), encoding="utf-8")
    assert "does not tell tenants apart" in tierkv("explain", record, "--key", A).stdout


def test_a_key_of_two_tenants_asks_for_one_of_them(tierkv: Run, tmp_path: Path) -> None:
    """One prompt of two customers has equal hashes: the loss of one is no loss of the other."""
    keys = [make_key(bytes(range(32)), 0, make_scope(salt, None)) for salt in ("acme", "umbra", None)]
    acme, umbra, plain = map(short_key, keys)
    rows = [
        {**entries()[0], "version": 2},
        {"is": "chunks", "step": 1, "t": 0.1, "tier": "disk", "event": "stored", "keys": [acme, umbra, plain]},
        {"is": "chunks", "step": 2, "t": 0.2, "tier": "disk", "event": "removed", "keys": [umbra]},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = tierkv("explain", path, "--key", "000102")
    assert said.exit_code == 1
    assert "3 chunks begin with 000102" in said.stderr
    assert "Give the tenant too" in said.stderr
    assert acme.replace(".0", "") in said.stderr
    for wanted in (acme, acme[: acme.index("@") + 5], keys[0].hex(), plain + "@", keys[2].hex()):
        told = tierkv("explain", path, "--key", wanted)
        assert (told.exit_code, "lost it" in told.stdout) == (0, False), wanted
    for wanted in (umbra, keys[1].hex()):
        assert "disk lost it" in tierkv("explain", path, "--key", wanted).stdout


def test_many_lines_are_cut_and_said(tierkv: Run, record: Path) -> None:
    """The end of a story matters most."""
    said = tierkv("explain", "--record", record, "--request", "chat-1", "--lines", 2)
    assert said.stdout.startswith("(3 earlier lines are omitted")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--request", "chat-7"], 1, "no request chat-7; it has 2 others. Nearest: chat-1, chat-2"),
        (["--key", "bb3366"], 1, f"no chunk bb3366; it has 3 others. Nearest: {OTHER}"),
        (["--key", "aa11aa", "--lines", "1"], 0, ""),
        (["--key", "zz"], 2, "at least 4 hexadecimal digits"),
        (["--key", "aa11", "--last-failures"], 2, "give one of"),
        (["--slowest", "3", "--follow"], 2, "leave out --follow"),
        ([], 2, "give one of"),
    ],
)
def test_what_cannot_be_told_is_explained(tierkv: Run, record: Path, words: list[str], code: int, says: str) -> None:
    """A misspelled id is answered with the nearest, wrong use with the right one; never with a traceback."""
    said = tierkv("explain", "--record", record, *words)
    assert said.exit_code == code, said.output
    assert says in said.output


def test_json_of_nothing_is_json(tierkv: Run, record: Path) -> None:
    """A script that reads the output got an empty text where the record has no such request."""
    said = tierkv("explain", record, "--request", "absent", "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout)["entries"] == []
    assert "no request absent" in said.stderr


def test_too_few_digits_ask_for_more(tierkv: Run, record: Path) -> None:
    """Two chunks in one story would be no story."""
    text = record.read_text(encoding="utf-8").replace(A, "aa22" * 7 + "aaaa.0")
    record.write_text(text, encoding="utf-8")
    said = tierkv("explain", "--record", record, "--key", "aa22")
    assert said.exit_code == 1
    assert "2 chunks begin with aa22" in said.output


def test_a_record_is_named_in_either_way(tierkv: Run, record: Path) -> None:
    """As `tierkv top` and `tierkv trace` name it, and as before; two names would be a mistake."""
    former = tierkv("explain", "--record", record, "--last-failures")
    assert tierkv("explain", record, "--last-failures").stdout == former.stdout
    for words in ([], [record, "--record", "other.jsonl"]):
        said = tierkv("explain", *words, "--last-failures")
        assert (said.exit_code, "give one RECORD" in said.stderr) == (2, True)


def test_a_directory_is_no_record(tierkv: Run, tmp_path: Path) -> None:
    """`Is a directory` alone does not say which file is meant."""
    said = tierkv("explain", tmp_path, "--last-failures")
    assert said.exit_code == 2
    assert f"{tmp_path}: is a directory; give the file" in said.stderr


def test_no_such_record(tierkv: Run, tmp_path: Path) -> None:
    """The commonest error: the wrong file."""
    said = tierkv("explain", "--record", tmp_path / "absent", "--last-failures")
    assert said.exit_code == 2
    assert "record.path" in said.output


def test_a_later_version_is_shown_as_far_as_it_is_known(tierkv: Run, record: Path) -> None:
    """Old programs meet new records."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"is": "dream", "step": 9, "t": 1.0, "r": "chat-1"}) + "\n")
    assert "dream (written by a later version)" in tierkv("explain", "--record", record, "--request", "chat-1").stdout


def test_following_prints_what_comes(record: Path) -> None:
    """As the server writes it, in a process of its own, until it is interrupted."""
    words = ["explain", "--record", str(record), "--request", "chat-1", "--follow", "--json"]
    command = [sys.executable, "-u", "-c", "from tierkv.cli.main import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline())["is"] for _ in range(5)]
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"is": "finished", "step": 9, "t": 1.0, "r": "chat-1", "account": {}}) + "\n")
        last = json.loads(process.stdout.readline())
        time.sleep(0)
        process.terminate()
    assert first == ["record", "answer", "op", "op end", "answer"]
    assert last["is"] == "finished"


@pytest.mark.parametrize("hash_bytes", [8, 16, 32])
def test_a_key_is_found_however_it_is_given(hash_bytes: int) -> None:
    """Short as in the record, whole in hex as in log lines, or its first digits; never with another group."""
    key = make_key(bytes(range(hash_bytes)), 2)
    short = short_key(key)
    assert matches(short, short)
    assert matches(short, key.hex())
    assert matches(short, key.hex()[:6])
    assert matches(short, key.hex()[: 2 * hash_bytes])
    assert not matches(short, short.replace(".2", ".3"))
    assert not matches(short, "ff" + short[2:])


def test_nearest_names_begin_alike() -> None:
    """Completions must look like typed text."""
    assert similar_names("request-44", ["chat-4", "request-4", "request-5"]) == ["request-4", "request-5"]
    assert similar_names("qwxz", ["request-1"]) == []
