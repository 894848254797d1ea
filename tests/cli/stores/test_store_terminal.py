"""The commands on stores where a terminal, a key, a place or a person is not as expected."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from filled_stores import chunk_key, disk_tier, fill, model_namespace, place_at, stack_file
from interrupts import heeding_interrupts

from tierkv.cli.main import cli
from tierkv.cli.output import print_table
from tierkv.plugins.loading import load_plugins
from tierkv.stores.places import find_places
from tierkv.stores.store import Store

PROGRAM = [sys.executable, "-m", "tierkv.cli.main"]
LLAMA = model_namespace("llama-3-8b")


def run(*words: object) -> tuple[int, str]:
    """Exit code and output of the program."""
    result = CliRunner().invoke(cli, [str(word) for word in words], prog_name="tierkv")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def read_to_end(terminal: int) -> Iterator[bytes]:
    """Everything that is written to the other end of a terminal, until it is closed."""
    try:
        while piece := os.read(terminal, 65_536):
            yield piece
    except OSError:  # how Linux says that it is closed
        return


def test_an_interrupted_copy_says_so_and_continues(tmp_path: Path) -> None:
    """Ctrl-C on a terminal: no traceback, no bar left behind, the exit code of a shell, and nothing is done twice."""
    count = 1_000  # a busy machine may take a while until it sees the first of them
    fill(place_at(tmp_path / "kv", "disk"), LLAMA, range(count))
    folder = tmp_path / "export"
    ours, theirs = pty.openpty()
    words = [*PROGRAM, "copy", str(tmp_path / "kv"), str(folder)]
    with (
        heeding_interrupts(),
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True) as child,
    ):
        os.close(theirs)
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.extend(read_to_end(ours)))
        reader.start()
        deadline = time.monotonic() + 120
        while not any(folder.glob("*/*/*.frame")) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        child.wait()
        reader.join()
    os.close(ours)
    shown = b"".join(said)
    assert child.returncode == 130, shown
    assert b"Traceback" not in shown
    assert b"\x1b[?25h" in shown, "the cursor is shown again"
    assert shown.rstrip().endswith(b"Interrupted. What was done until here stays done.")
    code, sums = run("copy", tmp_path / "kv", folder)
    assert code == 0, sums
    assert f"{count:,} were there" not in sums
    code, said_then = run("verify", folder)
    assert (code, said_then.startswith(f"{count:,} chunks ")) == (0, True), said_then


@pytest.mark.parametrize("words", [("inspect",), ("rm", "--yes", "--key")], ids=["inspect", "rm"])
@pytest.mark.parametrize("key", ["", "0xab", "zz", "ab.c", ".0"])
def test_what_is_no_key_is_refused(tmp_path: Path, words: tuple[str, ...], key: str) -> None:
    """A mistyped key that matches nothing, or everything, looks like success."""
    fill(place_at(tmp_path / "kv", "disk"), LLAMA, range(2))
    code, said = run(words[0], tmp_path / "kv", *words[1:], key)
    assert code == 2
    assert f"{key!r} is no key" in said


def test_rm_says_that_no_chunk_has_the_key(tmp_path: Path) -> None:
    """The beginning of a key is enough to look at a chunk, and not to remove it; capital letters are no other key."""
    fill(place_at(tmp_path / "kv", "disk"), LLAMA, range(2))
    key = chunk_key(1).hex()
    code, said = run("rm", tmp_path / "kv", "--key", key[:16], "--yes")
    assert (code, "no chosen namespace has a chunk with this key" in said) == (1, True)
    code, said = run("rm", tmp_path / "kv", "--key", key.upper(), "--yes")
    assert (code, said.startswith("1 chunk ")) == (0, True), said
    (tmp_path / "keys.txt").write_text(f"{key}\nnot one\n")
    stack = stack_file(tmp_path, disk_tier(tmp_path / "kv"), disk_tier(tmp_path / "below", name="below"))
    code, said = run("warm", stack, "--keys", tmp_path / "keys.txt")
    assert (code, "keys.txt, line 2: 'not one" in said) == (2, True), said


def test_a_dry_run_names_what_an_engine_has_open(tmp_path: Path) -> None:
    """A dry run that promises what the real one refuses is worse than none."""
    stack = stack_file(tmp_path, disk_tier(tmp_path / "disk"))
    (disk,) = find_places(str(stack), load_plugins())
    fill(disk, LLAMA, range(3))
    for words in (["rm", "--all"], ["gc", "--to", "0"], ["gc", "--older-than", "1d"]):
        with Store(disk, LLAMA, writes=True):
            code, said = run(words[0], stack, *words[1:], "--dry-run")
        assert code == 1
        assert f"process {os.getpid()} has it open" in said
        assert "0 chunks (0 B) would be removed" in said


def test_a_place_without_permission_is_a_line(tmp_path: Path) -> None:
    """A directory of another user is an answer, and no defect of tierkv."""
    place = tmp_path / "kv"
    fill(place_at(place, "disk"), LLAMA, range(1))
    place.chmod(0)
    powerless = [] if os.getuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    try:
        for words in (["ls", str(place)], ["ls", str(place / "below")], ["copy", str(place), str(tmp_path / "out")]):
            done = subprocess.run([*powerless, *PROGRAM, *words], capture_output=True, text=True, check=False)
            assert done.returncode == 2, done.stderr
            assert "Permission denied" in done.stderr
            assert "Traceback" not in done.stderr
    finally:
        place.chmod(0o700)


def test_an_error_of_the_system_is_one_line(tmp_path: Path) -> None:
    """A name that the file system refuses ends with a message, and with a traceback only for a report."""
    place = tmp_path / ("x" * 300)
    code, said = run("ls", place)
    assert (code, said.count("\n")) == (2, 1), said
    assert said.startswith(f"Error: {place}: File name too long")
    assert "Traceback" in run("--debug", "ls", place)[1]


def test_a_url_is_answered_by_those_who_take_urls(tmp_path: Path) -> None:
    """A server that is down is named; directories of disks have nothing to do with it."""
    del tmp_path
    code, said = run("ls", "valkey://127.0.0.1:1")
    assert code == 2
    assert "no connection" in said
    assert "disk" not in said
    assert "lmdb" not in said
    assert "a host is missing or misspelled" in run("ls", "valkey://[::1")[1]


def test_names_of_models_do_not_act_on_the_terminal(tmp_path: Path) -> None:
    """A bucket has names that others wrote: no escape sequence, and none that ends a command in another locale."""
    fill(place_at(tmp_path / "kv", "disk"), model_namespace("模型\x1b[31m\n"), range(1))
    for words in (["ls"], ["ls", "--chunks"], ["du"], ["rm", "--all"], ["inspect", chunk_key(0).hex()]):
        command = [*PROGRAM, words[0], str(tmp_path / "kv"), *words[1:]]
        done = subprocess.run(
            command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
        )
        said = done.stdout + done.stderr
        assert b"Traceback" not in said, said.decode()
        assert b"\x1b" not in said
        assert rb"\x1b[31m\n" in said


def test_a_narrow_terminal_gets_a_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A phone, or a split window: ten columns of three letters each say nothing."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    print_table("tiers", ["tier", "model", "bytes", "open in"], [["disk", "a-long-name", "1 GiB", ""]])
    assert click.unstyle(capsys.readouterr().out).split("\n") == [
        "tiers",
        "tier: disk",
        "model: a-long-name",
        "bytes: 1 GiB",
        "",
        "",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    print_table("tiers", ["tier", "model", "bytes", "open in"], [["disk", "a-long-name", "1 GiB", ""]])
    assert "│ disk │ a-long-name │ 1 GiB │" in click.unstyle(capsys.readouterr().out)
