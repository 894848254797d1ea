"""Shutdown: writes are kept, backends are closed once, and no hanging call keeps a process alive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

from dispatch_bench import KEYS, PATIENCE_S, dispatching, wait_for
from tier_bench import Bench, make_bench

from tierkv.abc import Capabilities
from tierkv.testing import faults
from tierkv.types.tier_ops import Completion, OutcomeKind, Verb


def test_close_finishes_writes_and_closes_backends(bench: Bench) -> None:
    """Writes that are queued for a durable tier at shutdown are hits after the next start."""
    with dispatching(bench) as dispatch:
        writes = [dispatch.write(number, number % 8, deadline_s=1e9) for number in range(8)]
        assert dispatch.dispatcher.close(PATIENCE_S) == 0
        dispatch.drain()
        assert [dispatch.kinds(op_id) for op_id in writes] == [[OutcomeKind.OK]] * 8
        assert all(bench.file(KEYS[number]).exists() for number in range(8))
        assert bench.backend.calls[-1] == "close"
        assert dispatch.dispatcher.close_errors == []


def test_close_is_idempotent_and_refuses_later_operations(bench: Bench) -> None:
    """Shutdown runs on error paths too, and an engine may run one more step in it."""
    with dispatching(bench) as dispatch:
        assert [dispatch.dispatcher.close(PATIENCE_S) for _ in range(3)] == [0, 0, 0]
        assert bench.backend.calls == ["close"]
        probe = dispatch.submit(Verb.PROBE, [1, 2])
        dispatch.drain()
        assert dispatch.kinds(probe) == [OutcomeKind.REFUSED] * 2
        assert dispatch.dispatcher.pending() == 0


def test_close_abandons_hanging_calls_and_counts_them(bench: Bench, tmp_path: Path, gate: Event) -> None:
    """A hung mount must not block the shutdown of a server. The writes of the other tier are finished."""
    other = make_bench(tmp_path / "other", beside=bench)
    hang = bench.backend.add("write", faults.hang_until(gate))
    one = Capabilities(preferred_concurrency=1)
    with dispatching(bench, bench.tier(capabilities=one), other.tier()) as dispatch:
        hung = dispatch.write(0, 0, deadline_s=1e9)
        wait_for(lambda: bench.backend.calls == ["write"], "the hung call")
        waiting = dispatch.write(1, 1, deadline_s=1e9)
        fine = dispatch.write(2, 2, deadline_s=1e9, tier=1)
        assert dispatch.dispatcher.close(0.05) == 1
        dispatch.drain()
        assert dispatch.kinds(hung) == [OutcomeKind.TIMED_OUT]
        assert [report.ended for report in dispatch.completions(hung)] == [False]
        assert dispatch.kinds(waiting) == [OutcomeKind.REFUSED]
        assert dispatch.kinds(fine) == [OutcomeKind.OK]
        assert other.file(KEYS[2]).exists()
        assert not bench.file(KEYS[1]).exists()
        assert (bench.backend.calls, other.backend.calls) == (["write", "close"], ["write", "close"])
        bench.backend.rules.remove(hang)
        gate.set()
        wait_for(lambda: bool(dispatch.drain()) or bench.file(KEYS[0]).exists(), "the hung call to end")


def test_close_survives_a_backend_that_hangs_or_raises_in_close(bench: Bench, tmp_path: Path, gate: Event) -> None:
    """Closing is a call of a plugin like any other (promise 3)."""
    other = make_bench(tmp_path / "other", beside=bench)
    bench.backend.add("close", faults.hang_until(gate))
    other.backend.add("close", faults.raise_error(lambda: SystemExit("not now")))
    with dispatching(bench, bench.tier(), other.tier()) as dispatch:
        assert dispatch.dispatcher.close(0.05) == 1
        assert dispatch.dispatcher.close_errors == ["files: SystemExit: not now"]
        gate.set()
    other.files.close()  # type: ignore[unused-coroutine]  # the blocking kind


def test_close_ends_with_a_stopped_clock(bench: Bench, gate: Event) -> None:
    """Tests and simulations control the clock. A close that waits for the clock alone would never return."""
    bench.backend.add("write", faults.hang_until(gate))
    with dispatching(bench) as dispatch:
        dispatch.write(0, 0, deadline_s=1e9)
        before_s = dispatch.clock()
        closing = Thread(target=dispatch.dispatcher.close, args=(0.05,), daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert dispatch.clock() == before_s
        gate.set()


def test_every_operation_is_reported_at_close(bench: Bench, gate: Event) -> None:
    """Without a completion of each operation, the manager would leak slots in a stack that is only reset."""
    bench.backend.add("read_into", faults.hang_until(gate), times=1)
    with dispatching(bench) as dispatch:
        ops = [dispatch.submit(Verb.READ, [number], [number % 8], deadline_s=1e9) for number in range(40)]
        ops += [dispatch.write(number, number, deadline_s=1e9) for number in range(4)]
        wait_for(lambda: "read_into" in bench.backend.calls, "the hung call")
        dispatch.dispatcher.close(0.05)
        dispatch.drain()
        assert sorted(report.op_id for report in dispatch.reports if isinstance(report, Completion)) == ops
        gate.set()


PROGRAM = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = {paths!r}
from dispatch_bench import dispatching, wait_for
from tier_bench import make_bench
from plain_files import AsyncPlainFiles, PlainFiles
from tierkv.dispatch import CopyPool, Dispatcher, TierLimits
from tierkv.testing import faults
from tierkv.types.tier_ops import Verb, TierOp

never = threading.Event()
kind = sys.argv[2]
bench = make_bench(Path(sys.argv[1]), AsyncPlainFiles if kind.startswith("async") else PlainFiles)
inside = threading.Event()

def hang(*_):
    inside.set()
    never.wait()

if kind == "threads":
    bench.backend.add("contains", lambda batch, inner: hang())
elif kind == "async thread":
    bench.files.files.contains = hang  # asyncio.to_thread never comes back
elif kind == "async loop":
    async def contains(keys):
        hang()
    bench.files.contains = contains
if kind == "copies":
    CopyPool().submit(hang)
else:
    tier = bench.tier(asynchronous=kind.startswith("async"))
    dispatcher = Dispatcher([tier], [TierLimits()], bench.clock, close_grace_s=0.1)
    dispatcher.submit(TierOp(1, 0, Verb.PROBE, (b"key",), (), 1e9))
assert inside.wait(60)
if len(sys.argv) > 3:
    print("abandoned", dispatcher.close(0.05))
print("leaving")
"""


def run_hanging_process(tmp_path: Path, *arguments: str) -> str:
    """Run a process in which a call hangs forever. Returns its output before it ended."""
    paths = [path for path in sys.path if path.endswith(("tests/support", "tests/testing"))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(paths=paths), str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_interpreter_exits_although_a_plugin_hangs(tmp_path: Path) -> None:
    """Promise 3: no hung thread, hung loop, or thread borrowed by an async plugin is joined at exit."""
    for kind in ("threads", "async thread", "async loop", "copies"):
        assert run_hanging_process(tmp_path / kind, kind) == "leaving\n"


def test_it_also_exits_after_a_close(tmp_path: Path) -> None:
    """The process also exits after an orderly shutdown."""
    assert run_hanging_process(tmp_path / "a", "threads", "close") == "abandoned 1\nleaving\n"
    assert run_hanging_process(tmp_path / "b", "async loop", "close") == "abandoned 2\nleaving\n"
