"""``tierkv top`` on real stacks: it shows what the stack did, and names trouble with its source."""

from __future__ import annotations

import errno
import http.server
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from stack_bed import Faults

from tierkv import open_stack, serve_metrics
from tierkv.cli.top import command
from tierkv.cli.top.changes import Changes
from tierkv.cli.top.command import Watch
from tierkv.cli.top.screen import whole_screen
from tierkv.cli.top.sources import MetricsPort, NoSampleError, RecordFile, source_of
from tierkv.cli.top.window import WINDOW_S, Window
from tierkv.errors import ConfigError
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, Prompt, engine_spec
from tierkv.testing.faults import raise_error

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ONCE_S", 0.05)


@contextmanager
def engine_on(place: Path, faults: Faults, **more: Any) -> Iterator[HandEngine]:
    """An engine over a host tier and a disk that can be made to fail."""
    disk = {
        "name": "disk", "backend": "faulty", "path": str(place / "disk"), "capacity": "2MiB", "min_free_bytes": 0,
        "segment_bytes": "1MiB", "breaker_failures": 2, "breaker_cooldown_s": 0.05, "retries": 0,
    }  # fmt: skip
    config = {"host": {"capacity": 16 * SLOT_BYTES}, "lookup": {"recompute": "off"}, "tiers": [disk], **more}
    with open_stack(config, engine_spec(), plugins=faults.registry()) as stack:
        yield HandEngine(stack)


def screen_of(watch: Watch, width: int = 80) -> str:
    """The screen as a terminal of this width shows it."""
    terminal = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    terminal.print(whole_screen(watch.source.name, watch.stacks, watch.changes.latest(10), watch.note, width))
    return terminal.export_text()


def test_the_figures_are_those_of_the_stack(tmp_path: Path, tierkv: Run) -> None:
    """One JSON object has what the stack itself counts: an operator decides by it."""
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack) as server:
        for number in range(6):
            engine.store(Prompt(number))
        engine.stack.flush()
        engine.stack.reset_cache()  # a slow disk may have kept the first prompt in the host tier
        assert engine.load(Prompt(0)) == 4
        done = tierkv("top", server.url, "--json")
        counters, content = engine.stack.metrics.counters, engine.stack.tiers.content()
    assert done.exit_code == 0, done.output
    (stack,) = json.loads(done.output)["stacks"]
    host, disk = stack["tiers"]
    assert (host["name"], disk["name"], disk["state"]) == ("host", "disk", "serves")
    assert (disk["chunks"], disk["held_bytes"]) == content["disk"][:2]
    assert disk["capacity_bytes"] == 2 << 20
    assert disk["hit_rate_since_start"] == counters.tokens_loaded["disk"] / counters.tokens_asked > 0
    assert stack["hit_rate_since_start"] == sum(counters.tokens_loaded.values()) / counters.tokens_asked


def test_rates_are_those_of_the_last_seconds(tmp_path: Path) -> None:
    """Growth between samples by the seconds between them; what was before the first sample is no part of it."""
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack) as server:
        engine.store(Prompt(0))
        engine.stack.flush()
        watch = Watch(MetricsPort(server.url))
        watch.look()
        before, asked = engine.stack.tiers.stats()["disk"], engine.stack.metrics.counters.tokens_asked
        for number in (1, 2, 3):
            engine.store(Prompt(number))
        engine.stack.flush()
        watch.look()
        after, asked_now = engine.stack.tiers.stats()["disk"], engine.stack.metrics.counters.tokens_asked
        (stack,) = watch.stacks
    written = stack.tiers[1].written_bytes_per_s
    assert written is not None
    assert written * stack.window_s == pytest.approx(after["bytes_written"] - before["bytes_written"])
    assert stack.tokens_asked_per_s * stack.window_s == pytest.approx(asked_now - asked)
    assert stack.hit_rate == 0


def test_a_tier_that_fails_and_heals_is_shown(tmp_path: Path) -> None:
    """State and events without a look at the log: out of service, how many chunks failed, in service again."""
    faults = Faults()
    with engine_on(tmp_path, faults) as engine, serve_metrics(engine.stack) as server:
        watch = Watch(MetricsPort(server.url))
        engine.store(Prompt(0))
        watch.look()
        gone = raise_error(lambda: OSError(errno.EIO, "gone"))
        rules = [faults.last.add(verb, gone) for verb in ("write", "read_into", "contains")]
        number = 0
        while engine.stack.tiers.health()["disk"].usable:
            number += 1
            engine.store(Prompt(number))
            engine.stack.flush(0.2)
        watch.look()
        shown = screen_of(watch)
        assert re.search(r"^disk +OUT", shown, flags=re.MULTILINE)
        assert "disk: OUT of service" in shown
        assert "chunks failed in the backend" in shown
        for rule in rules:
            faults.last.rules.remove(rule)
        engine.step_until(lambda: engine.stack.tiers.health()["disk"].usable, "the tier's return")
        watch.look()
        assert "disk: in service again" in screen_of(watch)


def test_a_tier_that_is_left_out_as_slow_is_shown(tmp_path: Path) -> None:
    """Its hits fall, and nothing of it is broken: without a word an operator looks for a fault."""
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack) as server:
        watch, costs = Watch(MetricsPort(server.url)), engine.stack._core.wiring.manager.read_costs
        watch.look()
        costs.note_slow(engine.stack._core.wiring.manager.tiers[0].index, is_slow=True)
        watch.look()
        assert re.search(r"^disk +slow", screen_of(watch), flags=re.MULTILINE)
        assert "disk: slower than computing: its hits are shortened" in screen_of(watch)
        costs.note_slow(engine.stack._core.wiring.manager.tiers[0].index, is_slow=False)
        watch.look()
        assert re.search(r"^disk +serves", screen_of(watch), flags=re.MULTILINE)
        assert "disk: faster than computing again" in screen_of(watch)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_on_a_terminal(tmp_path: Path, width: int) -> None:
    """The usual terminal has 80 columns; a figure that ends in an ellipsis is no figure."""
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack) as server:
        watch = Watch(MetricsPort(server.url))
        for number in range(6):
            engine.store(Prompt(number))
            watch.look()
        shown = screen_of(watch, width)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("evicts/s" in shown) == (width >= 100)


def test_it_survives_a_restart_of_the_engine(tmp_path: Path) -> None:
    """Engines are restarted at night: the view waits, says so, and goes on with the new process."""
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack) as server:
        port, watch = server.port, Watch(MetricsPort(server.url))
        engine.store(Prompt(0))
        watch.look()
        assert not watch.note
    watch.look()
    assert "does not answer" in watch.note
    assert "asked again" in screen_of(watch).replace("\n", " ")
    with engine_on(tmp_path, Faults()) as engine, serve_metrics(engine.stack, port):
        watch.look()
        assert not watch.note
        assert "begun anew" in screen_of(watch)
        engine.store(Prompt(0))
        watch.look()
        assert watch.stacks[0].tokens_asked_per_s > 0


def test_several_stacks_of_one_port(tmp_path: Path) -> None:
    """Replicas behind one port are separated by their labels, as vLLM's engines are."""
    values = 'tierkv_lookups_total{{engine="{0}",model_name="m"}} {1}.0\n'
    text = values.format(0, 7) + values.format(1, 3) + 'tierkv_tier_usable{engine="1",model_name="m",tier="disk"} 1.0\n'
    with answering(text.encode()) as url:
        watch = Watch(MetricsPort(url))
        watch.look()
    first, second = watch.stacks
    assert (first.labels, second.labels) == ("engine=0 model_name=m", "engine=1 model_name=m")
    assert [tier.name for tier in first.tiers] == ["host"]
    assert [tier.name for tier in second.tiers] == ["host", "disk"]


def test_a_record_is_watched_from_another_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a port the record serves: the same figures, while it is written."""
    monkeypatch.setattr("tierkv.recording.recorder.MEASURED_EVERY_S", 0.0)
    path = tmp_path / "run.jsonl"
    with engine_on(tmp_path, Faults(), record={"path": str(path)}) as engine:
        engine.store(Prompt(0))
        watch = Watch(source_of(str(path)))
        until(watch, lambda: bool(watch.stacks))
        engine.store(Prompt(1))
        asked = engine.stack.metrics.counters.tokens_asked
        for _ in range(3):
            engine.step()
        until(watch, lambda: watched_tokens(watch) == asked)
    done = subprocess.run(
        [sys.executable, "-m", "tierkv.cli.main", "top", str(path), "--once"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "disk" in done.stdout
    assert "serves" in done.stdout


def watched_tokens(watch: Watch) -> float:
    """Tokens asked so far, as the watch knows them."""
    return watch._windows[""].latest.get("tierkv_tokens_asked_total", {}).get("", 0)


def until(watch: Watch, condition: Callable[[], bool]) -> None:
    """Look until something is so: a record is written by a thread of its own."""
    give_up_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_s
        watch.look()
        time.sleep(0.01)


def test_a_record_that_is_silent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has ended looks like an idle one: the reader must see how old the figures are."""
    path = tmp_path / "run.jsonl"
    with engine_on(tmp_path, Faults(), record={"path": str(path)}) as engine:
        engine.store(Prompt(0))
    watch = Watch(RecordFile(path))
    later_s = time.time() + 3600
    monkeypatch.setattr(command.time, "time", lambda: later_s)
    watch.look()
    assert "no new figures for" in watch.note


# -- wrong targets -----------------------------------------------------------------------------------------------------


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """An HTTP server that answers everything with one body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"<html>hello</html>", 200, "a web page"),
        (b'{"a": 1}', 200, "not with metrics"),
        (b"# TYPE up gauge\nup 1\n", 200, "without metrics of tierkv; is a stack open"),
        (b'tierkv_lookups_total{engine="0" 1', 200, "not in the format of Prometheus"),
        (b"tierkv_lookups_total many\n", 200, "not in the format of Prometheus"),
        (b"", 200, "not with metrics"),
        (b"no", 404, "404 Not Found; the metrics of most programs are at /metrics"),
        (b"no", 503, "503 Service Unavailable"),
    ],
)
def test_an_answer_that_is_no_stack_is_named(body: bytes, status: int, why: str, tierkv: Run) -> None:
    """The wrong port of the right machine is the most frequent mistake; a traceback would not help."""
    with answering(body, status) as url:
        done = tierkv("top", url, "--once")
    assert done.exit_code == 2
    assert why in done.output.replace("\n", " ")


def test_no_answer_is_named(tierkv: Run) -> None:
    """Nothing listens there."""
    done = tierkv("top", ":1", "--json")
    assert done.exit_code == 2
    assert "http://127.0.0.1:1/metrics does not answer" in done.output
    assert "does the engine run, and serve its metrics there?" in done.output
    assert "asked again" not in done.output, "nothing asks again: the command has ended"


def test_an_interval_is_a_number(tierkv: Run) -> None:
    """`nan` is above no limit and below none; a sleep of that length ends with a traceback."""
    for words in ("nan", "inf"):
        done = tierkv("top", ":1", "--interval", words)
        assert (done.exit_code, "give a finite number" in done.output) == (2, True)


def test_a_record_that_does_not_exist_is_named(tmp_path: Path, tierkv: Run) -> None:
    """The message says where the path of a record comes from."""
    done = tierkv("top", tmp_path / "run.jsonl")
    assert done.exit_code == 2
    assert "record.path" in done.output


def test_a_record_without_figures_is_named(tmp_path: Path, tierkv: Run) -> None:
    """A record of an engine that made no step, or of an earlier version."""
    head = {
        "is": "record",
        "step": 0,
        "t": 0,
        "opened": "2026-01-01T00:00:00Z",
        "tiers": ["host"],
        "model": "m",
        "pid": 1,
    }
    (tmp_path / "run.jsonl").write_text(json.dumps(head) + "\n", encoding="utf-8")
    for words in ([tmp_path / "run.jsonl"], ["--record", tmp_path / "run.jsonl"]):
        done = tierkv("top", *words)
        assert done.exit_code == 2
        assert "has no figures yet" in done.output
    done = tierkv("top")
    assert (done.exit_code, "give one TARGET" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("target", "url"),
    [
        (":9100", "http://127.0.0.1:9100/metrics"),
        ("9100", "http://127.0.0.1:9100/metrics"),
        ("gpu-7.rack:8000", "http://gpu-7.rack:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://gpu-7:8000", "http://gpu-7:8000/metrics"),
        ("http://gpu-7:8000/", "http://gpu-7:8000/metrics"),
        ("http://gpu-7:8000/own/path", "http://gpu-7:8000/own/path"),
    ],
)
def test_ways_to_name_a_port(target: str, url: str) -> None:
    """Short forms for what is typed often."""
    assert source_of(target).name == url


@pytest.mark.parametrize("target", [":0", ":65536", "gpu-7:99999"])
def test_a_number_that_is_no_port(target: str) -> None:
    """`Connection refused` would send the operator to the engine."""
    with pytest.raises(ConfigError, match="a port is a number from 1 to 65535"):
        source_of(target)


@pytest.mark.parametrize("target", [":abc", "ftp://gpu-7/metrics", ":"])
def test_an_address_that_is_none(target: str) -> None:
    """It was looked for on the disk, and the message spoke of a record."""
    with pytest.raises(ConfigError, match="no address of metrics; give one such as :9400"):
        source_of(target)


def test_an_unknown_name_is_taken_for_a_record() -> None:
    """A name that is no address is a path; the answer to a host without a port names the port."""
    with pytest.raises(ConfigError, match=r"no such record.*; an address has a port, such as localhost:9400"):
        source_of("localhost")


def test_a_port_that_hangs_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that accepts and never answers must not freeze the view."""
    monkeypatch.setattr("tierkv.cli.top.sources.TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoSampleError, match="does not answer"):
        MetricsPort(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics").read()


def test_a_window_keeps_the_last_seconds_only() -> None:
    """A view that stays open for a month must not keep a month of samples, nor show its mean as the rate of now."""
    window = Window()
    for second in range(1000):
        assert window.add(float(second), {})
    assert window.seconds == pytest.approx(WINDOW_S, abs=1)
    assert len(window._samples) <= WINDOW_S + 2


def test_a_tier_that_cannot_be_written_is_said_once() -> None:
    """Read-only is a fault of its own; out of service says it already."""
    before = {"tierkv_tier_usable": {"a": 1.0, "b": 1.0}, "tierkv_tier_writable": {"a": 1.0, "b": 1.0}}
    now = {"tierkv_tier_usable": {"a": 0.0, "b": 1.0}, "tierkv_tier_writable": {"a": 0.0, "b": 0.0}}
    changes = Changes()
    changes.note_all(1.0, "", before, now)
    assert {(each.tier, each.kind) for each in changes.latest(9)} == {
        ("a", "OUT of service"),
        ("b", "cannot be written"),
    }
