"""``tierkv demo`` as a user runs it: real processes, real tiers, and a verdict that can be bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from interrupts import heeding_interrupts

from tierkv.cli.demo.processes import _without_interruptions
from tierkv.cli.main import cli
from tierkv.plugins.loading import load_plugins

pytestmark = pytest.mark.needs_torch

KEYS = (
    "tokens_equal", "tokens_computed", "tokens_loaded", "chunks_corrupt", "deferrals", "bytes_verified",
    "ttft_cold_s", "ttft_warm_s",
)  # fmt: skip


def run(*arguments: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "tierkv.cli.main", "demo", *arguments],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def report_of(*arguments: str) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    report: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    assert set(KEYS) <= set(report)
    return report


def test_every_tier_works(tmp_path: Path) -> None:
    """The main job: chunks went down through every tier and came back from each in a new process, bit-exact."""
    report = report_of("--workdir", str(tmp_path))
    assert report["tokens_equal"] is True
    assert report["tokens_loaded"]["disk"] > 0
    assert report["tokens_loaded"]["objects"] > 0
    assert report["tokens_computed"] < 0.7 * report["tokens_computed_without_tierkv"]
    assert report["chunks_corrupt"] == 0
    assert report["deferrals"] > 0
    assert report["bytes_verified"] > 4 << 20
    fill, again = report["phases"]["fill"], report["phases"]["again"]
    assert fill["pid"] != again["pid"]
    assert fill["counters"]["evictions"]["host"] > 0
    assert fill["counters"]["evictions"]["disk"] > 0


def test_damage_at_rest_is_refused_and_recomputed(tmp_path: Path) -> None:
    """--corrupt: flipped bytes are noticed, counted and computed again; the tokens stay."""
    report = report_of("--workdir", str(tmp_path), "--corrupt", "--conversations", "5")
    assert report["frames_damaged"] > 10
    assert report["chunks_corrupt"] > 5
    assert report["tokens_equal"] is True
    assert report["problems"] == []


def test_an_interruption_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C reaches the program and the processes of its phases: each of them printed a traceback."""
    command = [sys.executable, "-I", "-m", "tierkv.cli.main", "demo", "--workdir", str(tmp_path)]
    with (
        heeding_interrupts(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as run,
    ):
        patience_s = time.monotonic() + 120
        while not list(tmp_path.glob("objects/*")) and run.poll() is None:  # a phase serves
            assert time.monotonic() < patience_s
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGINT)
        _, said = run.communicate(timeout=120)
    assert run.returncode == 130
    assert said.strip() == "Interrupted. What was done until here stays done."


def test_an_interruption_while_a_process_starts_is_not_lost() -> None:
    """It was ignored for as long as the process of a phase started, and the demo went on to its end."""
    with heeding_interrupts(), pytest.raises(KeyboardInterrupt), _without_interruptions():
        os.kill(os.getpid(), signal.SIGINT)


def test_sliding_windows(tmp_path: Path) -> None:
    """--model hybrid: three groups of two kinds. What a window has passed is neither missed nor loaded."""
    report = report_of("--model", "hybrid", "--workdir", str(tmp_path), "--conversations", "6")
    assert report["engine"]["windows"] == [64, 64, None]
    assert report["tokens_equal"] is True
    assert report["tokens_loaded"]["disk"] > 0
    assert report["tokens_loaded"]["objects"] > 0
    assert report["tokens_computed"] < 0.7 * report["tokens_computed_without_tierkv"]
    phases = report["phases"].values()
    # A group's token: keys and values of two layers, 4 heads of 32 numbers of 2 bytes.
    whole = sum(report["tokens_loaded"].values()) * 3 * 2 * 2 * 4 * 32 * 2
    assert 0 < sum(phase["bytes_loaded"] for phase in phases) < 0.7 * whole


def test_two_ranks_and_windows_with_damage(tmp_path: Path) -> None:
    """All of it at once: each rank's process copies its heads, and a damaged chunk is refused for both of them."""
    report = report_of(
        "--model", "hybrid", "--tensor-parallel", "2", "--corrupt", "--conversations", "4", "--workdir", str(tmp_path)
    )
    assert report["engine"]["tensor_parallel"] == 2
    assert report["frames_damaged"] > 10
    assert report["chunks_corrupt"] > 5
    assert report["tokens_equal"] is True
    assert report["problems"] == []
    fill, again = report["phases"]["fill"], report["phases"]["again"]
    assert len({fill["pid"], *fill["worker_pids"], again["pid"], *again["worker_pids"]}) == 6
    assert fill["bytes_stored"] > 1 << 20
    assert again["bytes_loaded"] > 100_000


def test_heads_that_do_not_split_are_explained() -> None:
    """Bad input: the message says what divides what."""
    done = run("--tensor-parallel", "3", check=2)
    assert "kv_heads = 4 do not split evenly among tensor_parallel = 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_without_torch_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command in the help of a program that is installed without an engine."""
    monkeypatch.setitem(sys.modules, "torch", None)
    said = CliRunner().invoke(cli, ["demo"])
    assert said.exit_code == 2
    assert "which is not installed; pip install torch (its build for CPUs suffices)" in " ".join(said.output.split())


def test_a_demo_without_torch_and_backends_is_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `pip install .` alone: torch, then a backend, then another one were named, one at each attempt."""
    monkeypatch.setitem(sys.modules, "torch", None)
    bare = replace(load_plugins(), backends={})
    monkeypatch.setattr("tierkv.cli.demo.command.load_plugins", lambda: bare)
    said = " ".join(CliRunner().invoke(cli, ["demo"]).output.split())
    assert "checkout of tierkv: pip install . ./plugins/tierkv-disk ./plugins/tierkv-fsspec torch (its build" in said


def test_another_stack(tmp_path: Path) -> None:
    """--stack takes any stack: here a compressed LMDB tier alone below the host tier."""
    stack = tmp_path / "stack.toml"
    stack.write_text(
        '[host]\ncapacity = "2MiB"\n[chunk]\nblocks = 2\n'
        f'[[tiers]]\nbackend = "lmdb"\npath = "{tmp_path}/lmdb"\ncapacity = "64MiB"\ncodec = "zstd"\n'
    )
    report = report_of("--stack", str(stack), "--conversations", "4")
    assert report["tokens_equal"] is True
    assert report["tokens_loaded"]["lmdb"] > 0


def test_the_table_is_for_people(tmp_path: Path) -> None:
    """Without --json: a table per request, the totals, and a sentence that says what was shown; the page has it too."""
    page = tmp_path / "demo.html"
    out = run("--workdir", str(tmp_path), "--conversations", "3", "--html", str(page)).stdout
    assert "user-00" in out
    assert "tokens computed (without tierkv)" in out
    assert "Every generated token equals the run without tierkv." in out
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "Every generated token equals the run without tierkv." in text
    assert "user-02" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "nowhere.toml"),
        ("[host", "stack.toml"),
        ('[host]\ncapacity = "0"\n', "host.capacity"),
        ('[host]\ncapacity = "4MiB"\n[[tiers]]\nbackend = "dsk"\ncapacity = "1GiB"\n', "disk"),
        ('[host]\ncapacity = "4MiB"\n[[tiers]]\nbackend = "disk"\npath = "/proc/x"\ncapacity = "1GiB"\n', "/proc/x"),
        ('[host]\ncapacity = "4KiB"\n', "4096 bytes"),
    ],
)
def test_a_stack_that_cannot_be_used_is_explained(tmp_path: Path, text: str | None, message: str) -> None:
    """Bad input: exit code 2, one message that names what is wrong, and no traceback."""
    stack = tmp_path / ("nowhere.toml" if text is None else "stack.toml")
    if text is not None:
        stack.write_text(text)
    done = run("--stack", str(stack), "--conversations", "1", check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a real S3 server, found through the usual environment variables."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="demo")
    yield "s3://demo/kv"
    server.stop()


def test_objects_in_a_bucket(tmp_path: Path, bucket: str) -> None:
    """--object-url: the lowest tier is a real S3 server; the new process finds there what the old one put there."""
    report = report_of("--workdir", str(tmp_path), "--object-url", bucket, "--conversations", "5", "--corrupt")
    assert report["tokens_equal"] is True
    assert report["chunks_corrupt"] > 0
    # Read intact from the bucket. Damage cuts most prefixes, so how many of these are hits depends on who asks first.
    assert report["phases"]["again"]["counters"]["promotions"]["objects"] > 0


def test_a_bucket_that_does_not_exist_is_explained(tmp_path: Path, bucket: str) -> None:
    """Bad input: the message names the bucket; nothing is served before."""
    done = run("--workdir", str(tmp_path), "--object-url", bucket.replace("demo", "nobody"), check=2)
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr
