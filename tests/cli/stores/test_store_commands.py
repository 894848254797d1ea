"""The commands on stores, as an operator runs them: output, exit codes, kills, damage, a tier in use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from filled_stores import (
    FRAME_BYTES,
    SALT,
    chunk_key,
    disk_tier,
    fill,
    flip_byte,
    model_namespace,
    object_tier,
    place_at,
    sealed_frame,
    stack_file,
)

from tierkv.cli.main import cli
from tierkv.frames.frame import HEADER_BYTES
from tierkv.plugins.loading import load_plugins
from tierkv.recording.entries import short_key
from tierkv.stores.places import find_places, folder_place
from tierkv.stores.store import Store

Run = Callable[..., Result]
LLAMA, QWEN = model_namespace("llama-3-8b"), model_namespace("qwen-7b")


@pytest.fixture
def run() -> Run:
    """Runs the program in this process: `run("ls", path)`."""

    def call(*words: object) -> Result:
        return CliRunner().invoke(cli, [str(word) for word in words], prog_name="tierkv")

    return call


KILLED_REMOVAL = """
import os, shutil, signal
shutil.rmtree = lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL)
from tierkv.cli.main import cli
cli()
"""


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A stack with a disk of two models, and a bucket with more of one."""
    file = stack_file(tmp_path, disk_tier(tmp_path / "disk"), object_tier(tmp_path / "objects"))
    disk, objects = find_places(str(file), load_plugins())
    fill(disk, LLAMA, range(6))
    fill(disk, QWEN, range(3))
    fill(objects, LLAMA, range(10))
    return file


def told(result: Result, code: int = 0) -> dict[str, Any]:
    """JSON output of a command that ends with this exit code."""
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_ls_shows_each_namespace_by_its_model(run: Run, stack: Path) -> None:
    """The first question at night: what is on this disk?"""
    found = told(run("ls", stack, "--json"))
    rows = {(row["tier"], row["model"]): row for row in found["namespaces"]}
    assert {key: row["chunks"] for key, row in rows.items()} == {
        ("disk", "llama-3-8b"): 6, ("disk", "qwen-7b"): 3, ("objects", "llama-3-8b"): 10,
    }  # fmt: skip
    assert rows["disk", "qwen-7b"]["frame_bytes"] == 3 * FRAME_BYTES
    assert rows["disk", "qwen-7b"]["codecs_sampled"] == ["none"]
    assert rows["disk", "qwen-7b"]["newest_s"] is None, "a disk does not know times"
    assert time.time() - rows["objects", "llama-3-8b"]["newest_s"] < 3600
    text = run("ls", stack)
    assert text.exit_code == 0
    for word in ("llama-3-8b", "qwen-7b", "unknown", "19 chunks"):
        assert word in text.stdout
    assert found["total"] == {
        "namespaces": 2, "namespaces_by_tier": {"disk": 2, "objects": 1}, "chunks": 19, "frame_bytes": 19 * FRAME_BYTES,
    }  # fmt: skip
    assert text.stdout.splitlines()[-1].startswith("2 namespaces (2 in disk, 1 in objects), 19 chunks")
    objects = run("ls", stack, "--tier", "objects").stdout
    assert objects.splitlines()[-1].startswith("1 namespace, 10 chunks")
    assert objects.count("unknown") == 2, "neither the bytes on disk nor the last use are known, and no cell is empty"


def test_ls_lists_single_chunks_as_lines(run: Run, stack: Path) -> None:
    """Millions of chunks are piped into another program: one JSON object per line, no list in memory."""
    lines = [json.loads(line) for line in run("ls", stack, "--tier", "disk", "--chunks", "--json").stdout.splitlines()]
    assert {line["key"] for line in lines if line["model"] == "llama-3-8b"} == {chunk_key(n).hex() for n in range(6)}
    assert run("ls", stack, "--tier", "disk", "--chunks").stdout.count("\n") == 9


def test_du_adds_up_by_tenant_age_and_codec(run: Run, stack: Path) -> None:
    """An operator asks which tenant fills the tier, and with which codec."""
    by_tenant = told(run("du", stack, "--tier", "objects", "--by", "tenant", "--json"))["usage"]
    assert {row["tenant"] == "-": row["chunks"] for row in by_tenant} == {True: 5, False: 5}
    by_age = told(run("du", stack, "--by", "age", "--json"))["usage"]
    assert {(row["tier"], row["age"]): row["chunks"] for row in by_age} == {
        ("disk", "unknown"): 9, ("objects", "under 1 h"): 10,
    }  # fmt: skip
    by_codec = told(run("du", stack, "--by", "codec", "--json"))["usage"]
    assert {row["codec"] for row in by_codec} == {"none"}


@pytest.mark.parametrize("short", [True, False], ids=["short key", "whole key"])
def test_inspect_shows_a_chunk_in_each_tier(run: Run, stack: Path, short: bool) -> None:
    """A log line names a key: where is it, and is it whole?"""
    key = short_key(chunk_key(2)) if short else chunk_key(2).hex()
    found = told(run("inspect", stack, key, "-n", "llama*", "--json"))["chunks"]
    assert {row["tier"] for row in found} == {"disk", "objects"}
    assert all(row["whole"] and row["codec"] == "none" and row["group"] == 0 for row in found)
    shown = run("inspect", stack, key, "--tier", "objects").stdout
    assert re.search(r"rank\W+unknown", shown), "an object does not name its place in the prompt"
    absent = run("inspect", stack, "ab" * 36)
    assert absent.exit_code == 1
    assert "no store has a chunk with this key" in absent.output


def test_verify_names_damage_and_repairs_it(run: Run, stack: Path, tmp_path: Path) -> None:
    """Exit code 1 at damage, also when it was repaired, so that a cron job tells; 0 the next time."""
    assert run("verify", stack).exit_code == 0
    segments = (tmp_path / "disk" / LLAMA.fingerprint().hex()).glob("segment-*.dat")
    flip_byte(next(segments), bytes(sealed_frame(LLAMA, 4)[:HEADER_BYTES]), HEADER_BYTES + 9)
    found = told(run("verify", stack, "--json"), 1)
    assert [(each["kind"], each["subject"]) for each in found["findings"]] == [("damaged", chunk_key(4).hex())]
    repaired = told(run("verify", stack, "--repair", "--json"), 1)
    assert repaired["removed"] == 1
    again = told(run("verify", stack, "--json"))
    assert again["chunks"] == 18


DAMAGES = {
    "empty log": lambda disk: (disk / "index.log").write_bytes(b""),
    "no log": lambda disk: (disk / "index.log").unlink(),
    "no segment": lambda disk: next(disk.glob("segment-*.dat")).unlink(),
    "cut segment": lambda disk: os.truncate(next(disk.glob("segment-*.dat")), 4096),
    "no manifest": lambda disk: (disk / "namespace.json").unlink(),
    "rubbish manifest": lambda disk: (disk / "namespace.json").write_bytes(b"\xff\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", ["ls", "du", "verify", "copy"])
def test_damaged_files_of_a_disk_are_lines(run: Run, tmp_path: Path, damage: str, command: str) -> None:
    """Whatever happened to the files, the tool that is to find out may not end with a traceback."""
    fill(place_at(tmp_path / "kv", "disk"), LLAMA, range(4))
    DAMAGES[damage](tmp_path / "kv" / LLAMA.fingerprint().hex())
    more = [tmp_path / "out"] if command == "copy" else []
    result = run(command, tmp_path / "kv", *more)
    assert result.exit_code in (1, 2) or command in ("ls", "du"), result.output
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert "Traceback" not in result.output


@pytest.mark.parametrize("file", ["data.mdb", "namespace.json", "tierkv-lmdb.json"])
@pytest.mark.parametrize("size", [0, 5000])
def test_damaged_files_of_an_lmdb_tier_are_lines(run: Run, tmp_path: Path, file: str, size: int) -> None:
    """LMDB trusts its file and may end the process: the file is checked before it is opened."""
    fill(place_at(tmp_path / "kv", "lmdb"), LLAMA, range(4))
    path = next((tmp_path / "kv").rglob(file))
    path.write_bytes((b"\x5a" * 7919 * 3)[:size])
    for command in ("ls", "verify", "du"):
        result = run(command, tmp_path / "kv")
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)


def test_damaged_objects_are_lines_and_are_removed(run: Run, tmp_path: Path) -> None:
    """An object with a damaged header has no key any more; it is named by its URL, and can be removed all the same."""
    place = place_at(tmp_path / "kv", "fsspec")
    fill(place, LLAMA, range(6))
    files = sorted(path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.name != "namespace.json")
    files[0].write_bytes(b"rubbish")
    files[1].write_bytes(bytes(FRAME_BYTES))
    data = bytearray(files[2].read_bytes())
    data[HEADER_BYTES + 5] ^= 1
    files[2].write_bytes(data)
    found = told(run("verify", tmp_path / "kv", "--json"), 1)
    assert len(found["findings"]) == 3
    assert sum(files[n].name in each["subject"] for n in (0, 1) for each in found["findings"]) == 2
    assert told(run("verify", tmp_path / "kv", "--repair", "--json"), 1)["removed"] == 3
    assert told(run("verify", tmp_path / "kv", "--json"))["chunks"] == 3


def test_a_backend_of_a_stack_file_is_refused(run: Run, stack: Path) -> None:
    """The option was ignored, with any value."""
    said = run("ls", stack, "--backend", "dsik")
    assert said.exit_code == 2
    assert "which names its backends; leave it out" in said.output


def test_rm_takes_what_is_chosen_and_nothing_else(run: Run, stack: Path, tmp_path: Path) -> None:
    """A removal without a choice, or without a confirmation, is refused."""
    assert run("rm", stack, "--yes").exit_code == 2
    unconfirmed = run("rm", stack, "-n", "qwen*")
    assert unconfirmed.exit_code == 2
    assert "--yes" in unconfirmed.output
    for option, fix in (("--tenant", "- for requests without one"), ("-n", "give a model")):
        unset = run("rm", stack, option, "", "--yes")  # a variable of the shell that is not set
        assert unset.exit_code == 2
        assert fix in unset.output
    assert told(run("rm", stack, "-n", "qwen*", "--dry-run", "--json"))["chunks"] == 3
    for option in ("-n", "--namespace", "--model"):  # the summaries of the commands speak of models
        assert told(run("ls", stack, option, "qwen*", "--json"))["namespaces"][0]["chunks"] == 3
    assert told(run("rm", stack, "-n", "qwen*", "--yes", "--json"))["namespaces"] == 1
    assert not (tmp_path / "disk" / QWEN.fingerprint().hex()).exists()
    assert told(run("rm", stack, "--tier", "disk", "--tenant", "customer", "--yes", "--json"))["chunks"] == 3
    assert told(run("rm", stack, "--key", short_key(chunk_key(2)), "--yes", "--json"))["chunks"] == 2
    left = {row["tier"]: row["chunks"] for row in told(run("ls", stack, "--json"))["namespaces"]}
    assert left == {"disk": 2, "objects": 9}


@pytest.mark.parametrize("backend", ["disk", "lmdb"])
def test_rm_finishes_a_removal_that_was_killed(run: Run, tmp_path: Path, backend: str) -> None:
    """A kill between the rename and the last file leaves gigabytes that `ls` does not show; it is repeated."""
    fill(place_at(tmp_path / "kv", backend), LLAMA, range(4))
    command = (sys.executable, "-c", KILLED_REMOVAL, "rm", str(tmp_path / "kv"), "-n", "llama*", "--yes")
    assert subprocess.run([*command, "--backend", backend], check=False).returncode == -signal.SIGKILL
    assert not list((tmp_path / "kv").glob(LLAMA.fingerprint().hex()))
    (half,) = [path for path in (tmp_path / "kv").iterdir() if path.is_dir()]
    assert run("rm", tmp_path / "kv", "--backend", backend, "-n", "llama*", "--dry-run").exit_code == 2
    assert half.exists()
    again = told(run("rm", tmp_path / "kv", "--backend", backend, "-n", "llama*", "--yes", "--json"))
    assert again["finished_bytes"] > 4 * FRAME_BYTES
    assert not half.exists()
    assert "no namespace matches" in run("rm", tmp_path / "kv", "--backend", backend, "-n", "llama*", "--yes").output


def test_rm_by_age_says_where_the_age_is_unknown(run: Run, stack: Path) -> None:
    """Nothing is removed by a guess."""
    found = told(run("rm", stack, "--older-than", "1h", "--yes", "--json"), 1)
    assert (found["chunks"], found["unknown_age"]) == (0, 9)
    assert "--unused-for" in found["findings"][0]["reason"]


def test_gc_keeps_a_size_and_gives_files_back(run: Run, stack: Path, tmp_path: Path) -> None:
    """A full disk is shrunk: chunks go, and the file system gets its room."""
    segments = list((tmp_path / "disk").rglob("segment-*.dat"))
    before = sum(path.stat().st_size for path in segments)
    size = 4 * FRAME_BYTES
    assert told(run("gc", stack, "--tier", "disk", "--to", size, "--dry-run", "--json"))["chunks"] == 5
    found = told(run("gc", stack, "--tier", "disk", "--to", size, "--shrink", "--yes", "--json"))
    assert found["chunks"] == 5
    after = sum(path.stat().st_size for path in segments if path.exists())
    assert found["given_up_bytes"] == before - after > 0
    assert told(run("verify", stack, "--tier", "disk", "--json"))["chunks"] == 4
    assert run("gc", stack, "--yes").exit_code == 2
    assert run("gc", stack, "--to", "12 apples", "--yes").exit_code == 2


def test_gc_says_where_room_stays_in_the_files(run: Run, stack: Path) -> None:
    """Only whole files and their ends go back, so an operator of a full disk needs the other way."""
    first, second = (
        run("gc", stack, "--tier", "disk", "--to", left * FRAME_BYTES, "--shrink", "--yes").output for left in (8, 7)
    )
    assert "0 B of files given back" not in first, "the free end of a file"
    assert "`tierkv copy`" not in first
    assert "1 chunk" in second
    assert "; 0 B of files given back, the rest stays between chunks, for new ones: `tierkv copy` to a new" in second


def test_copy_out_and_in_moves_a_tier(run: Run, stack: Path, tmp_path: Path) -> None:
    """A tier goes to another machine: a folder with a manifest, and back."""
    folder = tmp_path / "export"
    assert told(run("copy", stack, folder, "--tier", "disk", "--json"))["chunks"] == 9
    assert told(run("copy", stack, folder, "--tier", "disk", "--json"))["present"] == 9
    manifest = json.loads((folder / "tierkv-export.json").read_text())
    assert sorted(each["chunks"] for each in manifest["namespaces"]) == [3, 6]
    (tmp_path / "elsewhere").mkdir()
    other = stack_file(tmp_path / "elsewhere", disk_tier(tmp_path / "new"))
    assert told(run("copy", folder, other, "--json"))["chunks"] == 9
    assert told(run("verify", other, "--json"))["chunks"] == 9
    assert run("copy", stack, folder).exit_code == 2, "two tiers: choose one"
    assert run("copy", folder, folder).exit_code == 2


def test_a_new_disk_takes_the_room_of_its_chunks(run: Run, tmp_path: Path) -> None:
    """Without a stack file a target has no capacity: room for a tier as large as the file system would be taken."""
    source = place_at(tmp_path / "one", "disk")
    for numbers in (range(20), range(20, 60)):
        fill(source, model_namespace(), numbers)
        done = run("copy", tmp_path / "one", tmp_path / "two", "--to-backend", "disk", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["chunks"] == len(numbers)
        files = [path.stat() for path in (tmp_path / "two").rglob("*") if path.is_file()]
        assert sum(status.st_blocks * 512 for status in files) < 64 << 20
    assert run("verify", tmp_path / "two").exit_code == 0


def test_a_file_is_no_target_of_a_copy(run: Run, stack: Path, tmp_path: Path) -> None:
    """`Not a directory` alone leaves a user guessing what would be one."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    said = run("copy", stack, tmp_path / "notes.txt", "--tier", "disk")
    assert said.exit_code == 2
    assert "notes.txt is a file: give a new directory, a stack file" in " ".join(said.stderr.split())


@pytest.mark.parametrize("target", ["disk/backup", "."])
def test_a_copy_into_its_source_is_refused(run: Run, stack: Path, tmp_path: Path, target: str) -> None:
    """A tier's directory is for its files alone: some backends refuse one that has others."""
    before = place_files(tmp_path / "disk")
    said = run("copy", stack, tmp_path / target, "--tier", "disk", "--to-backend", "folder")
    assert said.exit_code == 2
    assert "one is inside of the other; give a target outside of it" in " ".join(said.stderr.split())
    assert place_files(tmp_path / "disk") == before


@pytest.mark.parametrize("content", [b"\xff\xfe rubbish\n", b"ab.0\n" + bytes(100_000), b"a" * 10_000 + b"\n"])
def test_a_file_that_has_no_keys_is_named(run: Run, stack: Path, tmp_path: Path, content: bytes) -> None:
    """The wrong file must end with its name and a line, not with the traceback of a decoder."""
    keys = tmp_path / "keys.bin"
    keys.write_bytes(content)
    said = run("warm", stack, "--keys", keys)
    assert said.exit_code in (1, 2)
    assert isinstance(said.exception, SystemExit)
    assert "is no key" in said.output or "no chosen namespace has a chunk" in said.output
    assert len(said.output) < 20_000


def test_a_killed_copy_continues(tmp_path: Path) -> None:
    """Kill -9 in the middle: no half chunk counts, and the repeated copy completes the export."""
    count = 600
    fill(place_at(tmp_path / "kv", "disk"), LLAMA, range(count))
    folder = tmp_path / "export"
    program = [sys.executable, "-m", "tierkv.cli.main", "copy", str(tmp_path / "kv"), str(folder)]
    child = subprocess.Popen(program, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*/*/*.frame"))) < 20 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = len(list(folder.glob("*/*/*.frame")))
    assert there >= 20
    run = CliRunner()
    found = run.invoke(cli, ["copy", str(tmp_path / "kv"), str(folder), "--json"])
    sums = told(found)
    assert sums["present"] + sums["chunks"] == count
    assert sums["present"] >= 20
    assert told(run.invoke(cli, ["verify", str(folder), "--json"]))["chunks"] == count


def test_a_copy_survives_chunks_that_vanish(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of a bucket removes chunks while they are copied: those are no damage."""
    place = place_at(tmp_path / "kv", "fsspec")
    fill(place, LLAMA, range(12))
    listed = Store.list_frames

    def listed_then_removed(self: Store, **options: Any) -> Any:
        frames = list(listed(self, **options))
        if self.place.backend.name == "fsspec":
            with Store(place, LLAMA, writes=True) as other:
                other.delete([chunk_key(number) for number in range(5)])
        return iter(frames)

    monkeypatch.setattr(Store, "list_frames", listed_then_removed)
    found = told(run("copy", tmp_path / "kv", tmp_path / "out", "--json"))
    assert (found["chunks"], found["gone"]) == (7, 5)


def test_warm_fills_the_disk_from_the_bucket(run: Run, stack: Path, tmp_path: Path) -> None:
    """A new machine starts with an empty disk: the first requests should not pay for that."""
    (tmp_path / "more").mkdir()
    new = stack_file(tmp_path / "more", disk_tier(tmp_path / "new"), object_tier(tmp_path / "objects"))
    record = tmp_path / "record.jsonl"
    entries = [
        {"is": "record", "step": 0, "t": 0, "tiers": ["host", "disk"], "model": "m", "pid": 7, "opened": "today"},
        {"is": "job", "step": 4, "t": 0.6, "r": "a", "job": 9, "store": False, "keys": [short_key(chunk_key(3))]},
        {"is": "job", "step": 4, "t": 0.6, "r": "b", "job": 9, "store": False, "keys": [short_key(chunk_key(5))]},
    ]
    record.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert told(run("warm", new, "--record", record, "--request", "a", "--dry-run", "--json"))["chunks"] == 1
    assert told(run("warm", new, "--record", record, "--json"))["chunks"] == 2
    keys = tmp_path / "keys.txt"
    keys.write_text(f"{chunk_key(0).hex()}\n{short_key(chunk_key(3))}\n")
    warmed = told(run("warm", new, "--keys", keys, "--json"))
    assert (warmed["chunks"], warmed["present"]) == (1, 1)
    assert told(run("warm", new, "-n", "llama*", "--json"))["chunks"] == 7
    assert told(run("ls", new, "--tier", "disk", "--json"))["namespaces"][0]["chunks"] == 10


def test_keys_that_no_tier_has_are_named(run: Run, stack: Path, tmp_path: Path) -> None:
    """A list of keys from the wrong machine would otherwise look like a stack that is warm already."""
    keys, short = tmp_path / "keys.txt", short_key(chunk_key(7))
    for chosen, (chunks, present), lost in (
        ((short, "ab.0", "cd" * 36), (1, 0), ["ab.0", "cd" * 36]),
        ((short, chunk_key(2).hex()), (0, 2), []),
        ((chunk_key(0).hex(), "ab.0"), (0, 1), ["ab.0"]),
    ):
        keys.write_text("\n".join(chosen))
        found = told(run("warm", stack, "--keys", keys, "--json"))
        assert (found["chunks"], found["present"], found["not_found"]) == (chunks, present, lost)
        assert (found["not_found_count"], found["findings"]) == (len(lost), [])
    assert "; 1 of 2 chosen keys not found: ab.0" in run("warm", stack, "--keys", keys).stdout
    keys.write_text("\n".join(f"{number:02x}.0" for number in range(7)))
    found = told(run("warm", stack, "--keys", keys, "--json"), 1)
    assert (found["not_found_count"], found["findings"][0]["kind"]) == (7, "missing")
    assert found["findings"][0]["subject"] == "00.0, 01.0, 02.0, 03.0, 04.0 and 2 more"
    removed = run("rm", stack, "--key", short, "--key", "ab.0", "--yes")
    assert (removed.exit_code, "; 1 of 2 chosen keys not found: ab.0" in removed.stdout) == (0, True)


def test_a_key_that_the_target_alone_has_is_found(run: Run, stack: Path, tmp_path: Path) -> None:
    """A disk that has the chunk is warm, though the bucket has lost it; and a full disk leaves no key unsearched."""
    keys = tmp_path / "keys.txt"
    keys.write_text(chunk_key(4).hex())
    assert run("rm", stack, "--tier", "objects", "--key", chunk_key(4).hex(), "--yes").exit_code == 0
    found = told(run("warm", stack, "--keys", keys, "--json"))
    assert (found["chunks"], found["present"], found["not_found"]) == (0, 1, [])
    (tmp_path / "more").mkdir()
    small = disk_tier(tmp_path / "new", capacity=str(2 * FRAME_BYTES)).replace('"32768"', str(2 * FRAME_BYTES))
    new = stack_file(tmp_path / "more", small, object_tier(tmp_path / "objects"))
    keys.write_text("\n".join([*(chunk_key(number).hex() for number in range(10) if number != 4), "ab.0"]))
    found = told(run("warm", new, "--keys", keys, "--json"))
    assert (found["is_full"], found["not_found"]) == (True, ["ab.0"])


def test_warm_ends_where_the_disk_is_full(run: Run, stack: Path, tmp_path: Path) -> None:
    """A disk smaller than the bucket is the usual case, and no failure."""
    (tmp_path / "more").mkdir()
    small = disk_tier(tmp_path / "new", capacity=str(4 * FRAME_BYTES)).replace('"32768"', str(4 * FRAME_BYTES))
    new = stack_file(tmp_path / "more", small, object_tier(tmp_path / "objects"))
    found = told(run("warm", new, "--json"))
    assert found["is_full"]
    assert 0 < found["chunks"] <= 4


def test_a_tier_in_use_is_read_and_not_changed(run: Run, stack: Path) -> None:
    """Beside an engine, reading commands work and changing ones say which process has the tier."""
    disk = find_places(str(stack), load_plugins(), tier="disk")[0]
    with Store(disk, LLAMA, writes=True):
        rows = told(run("ls", stack, "--tier", "disk", "--json"))["namespaces"]
        assert {row["model"]: row["in_use_by"] for row in rows} == {
            "llama-3-8b": f"process {os.getpid()}", "qwen-7b": None,
        }  # fmt: skip
        assert told(run("verify", stack, "--json"))["chunks"] == 19
        for words in (("rm", stack, "-n", "llama*", "--tier", "disk", "--yes"), ("verify", stack, "--repair")):
            refused = run(*words)
            assert refused.exit_code == 1
            assert "in use by this process" in " ".join(refused.output.split())
    assert told(run("verify", stack, "--json"))["chunks"] == 19


@pytest.mark.parametrize("command", ["ls", "du", "inspect", "verify", "rm", "gc", "copy", "warm"])
def test_every_command_has_examples_and_refuses_a_wrong_place(run: Run, tmp_path: Path, command: str) -> None:
    """--help is the manual, and a misspelled path is a usage error."""
    assert "Examples:" in run(command, "--help").output
    more = {"inspect": ["ab"], "rm": ["--all", "--yes"], "gc": ["--to", "1GiB"], "copy": [tmp_path / "out"]}.get(
        command, []
    )
    for wrong in (tmp_path / "absent", tmp_path / "absent.toml", "s4://bucket/x"):
        result = run(command, wrong, *more)
        assert result.exit_code == 2, result.output
        assert str(wrong) in result.output


def test_a_folder_of_another_program_is_no_target(run: Run, stack: Path, tmp_path: Path) -> None:
    """An export into the user's documents is refused before anything is written."""
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").write_text("the only copy")
    result = run("copy", stack, documents, "--tier", "disk")
    assert result.exit_code == 2
    assert [path.name for path in documents.iterdir()] == ["thesis.txt"]
    fill(folder_place(str(tmp_path / "export")), LLAMA, range(1))


@pytest.mark.parametrize("backend", ["disk", "lmdb"])
def test_upkeep_is_no_use_of_a_namespace(run: Run, tmp_path: Path, backend: str) -> None:
    """A namespace that is verified or shrunk every night would otherwise never be one that is unused for 14 days."""
    place = place_at(tmp_path / "kv", backend)
    fill(place, LLAMA, range(6))
    fill(place, QWEN, range(3))
    lock = "lock" if backend == "disk" else "owner.lock"
    long_ago = 1_000_000_000.0
    for file in place_files(tmp_path / "kv"):
        if file.name == lock:
            os.utime(file, (long_ago, long_ago))
    commands = (
        ("ls", "--chunks"), ("verify",), ("verify", "--repair"), ("rm", "--key", chunk_key(0).hex(), "--yes"),
        ("gc", "--to", "4KiB", "-n", "qwen*", "--yes"), ("gc", "--to", "1GiB", "--shrink", "--yes"),
    )  # fmt: skip
    for command, *words in commands:
        assert run(command, tmp_path / "kv", *words).exit_code == 0
        used = {row["last_used_s"] for row in told(run("ls", tmp_path / "kv", "--json"))["namespaces"]}
        assert used == {long_ago}, command
    fill(place, LLAMA, range(1))
    by_model = {row["model"]: row["last_used_s"] for row in told(run("ls", tmp_path / "kv", "--json"))["namespaces"]}
    assert by_model["qwen-7b"] == long_ago < by_model["llama-3-8b"]
    assert told(run("rm", tmp_path / "kv", "--unused-for", "14d", "--yes", "--json"))["namespaces"] == 1


def test_a_dry_run_ends_where_the_copy_would(run: Run, tmp_path: Path) -> None:
    """A user who plans a move must not read that 10 chunks would be copied where 4 have room."""
    small = f"{4 * FRAME_BYTES}"
    file = stack_file(tmp_path, disk_tier(tmp_path / "disk", small), object_tier(tmp_path / "objects"))
    fill(find_places(str(file), load_plugins(), tier="objects")[0], LLAMA, range(10))
    for _ in range(2):  # a new place, and one with chunks
        planned = told(run("warm", file, "--dry-run", "--json"))
        done = told(run("warm", file, "--json"))
        assert (planned["chunks"], planned["present"], planned["is_full"]) == (done["chunks"], done["present"], True)
        run("rm", file, "--tier", "disk", "--key", chunk_key(0).hex(), "--yes")
    words = ("copy", file, file, "--tier", "objects", "--to-tier", "disk", "--json")
    planned, done = told(run(*words, "--dry-run"), 1), told(run(*words), 1)
    assert (planned["chunks"], planned["is_full"]) == (done["chunks"], True)
    assert planned["findings"][0]["kind"] == done["findings"][0]["kind"] == "incomplete"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs procfs, in which no user can create files")
@pytest.mark.parametrize("backend", ["folder", "disk", "lmdb", "fsspec"])
def test_a_dry_run_names_a_target_that_cannot_be(run: Run, tmp_path: Path, backend: str) -> None:
    """A move that was planned for a place without permission failed at its first chunk, with the engine stopped."""
    fill(place_at(tmp_path / "disk", "disk"), LLAMA, range(3))
    for place, ends_well in (("/proc/tier", False), (str(tmp_path / "new" / "tier"), True)):
        target = f"file://{place}" if backend == "fsspec" else place
        words = ("copy", tmp_path / "disk", target, "--to-backend", backend, "--dry-run", "--json")
        planned = told(run(*words), 0 if ends_well else 1)
        assert planned["chunks"] == (3 if ends_well else 0)
        assert [each["kind"] for each in planned["findings"]] == ([] if ends_well else ["unusable"])
    assert "/proc" in told(run(*words[:2], "/proc/tier", "--dry-run", "--json"), 1)["findings"][0]["reason"]
    assert not (tmp_path / "new").exists()


def test_a_request_needs_its_record(run: Run, stack: Path) -> None:
    """Without the record the choice would be none, and everything would be copied."""
    done = run("warm", stack, "--request", "chatcmpl-17")
    assert (done.exit_code, "give --record as well" in done.output) == (2, True)


def test_a_tier_is_not_warmed_from_itself(run: Run, stack: Path) -> None:
    """The message said that no tier is below the bucket, which is another mistake."""
    done = run("warm", stack, "--from", "objects", "--to", "objects")
    assert (done.exit_code, "copied to the tier itself; give another --from or --to" in done.output) == (2, True)


def test_verify_says_what_an_export_lacks(run: Run, stack: Path, tmp_path: Path) -> None:
    """A backup that lost files on its way, or was interrupted, has only whole chunks and is no backup."""
    folder = tmp_path / "backup"
    assert run("copy", stack, folder, "--tier", "objects").exit_code == 0
    assert run("verify", folder).exit_code == 0
    next(folder.rglob("*.frame")).unlink()
    (finding,) = told(run("verify", folder, "--json"), 1)["findings"]
    assert (finding["kind"], finding["subject"]) == ("missing", "llama-3-8b")
    assert finding["reason"] == "the manifest has 10 chunks, and 9 are there"
    assert run("verify", folder, "--tenant", SALT).exit_code == 0
    manifest = json.loads((folder / "tierkv-export.json").read_text())
    manifest["namespaces"][0] |= {"chunks": None, "frame_bytes": None}
    (folder / "tierkv-export.json").write_text(json.dumps(manifest))
    (finding,) = told(run("verify", folder, "--json"), 1)["findings"]
    assert (finding["kind"], "interrupted, and 9 chunks" in finding["reason"]) == ("incomplete", True)


@pytest.mark.parametrize(
    "words", [("rm", "--key", chunk_key(0).hex()), ("gc", "--to", "32KiB"), ("rm", "--tenant", SALT)]
)
def test_what_is_removed_from_an_export_is_not_missed(run: Run, stack: Path, tmp_path: Path, words: list[str]) -> None:
    """A backup that was shrunk on purpose is complete: its next import must not end with a failure."""
    folder = tmp_path / "backup"
    assert run("copy", stack, folder, "--tier", "objects").exit_code == 0
    command, *options = words
    before = told(run(command, folder, *options, "--dry-run", "--json"))
    assert told(run(command, folder, *options, "--yes", "--json"))["chunks"] == before["chunks"] > 0
    assert run("verify", folder).exit_code == 0
    assert told(run("copy", folder, tmp_path / "again", "--json"))["chunks"] == 10 - before["chunks"]


def place_files(root: Path) -> list[Path]:
    """All files below a directory."""
    return [path for path in root.rglob("*") if path.is_file()]
