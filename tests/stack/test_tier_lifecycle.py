"""Tiers attached and detached while requests are served: no chunk is lost, no step waits, no answer is wrong."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from stack_bed import Faults, opened, prompts_of, serve, stack_config

from tierkv.errors import BackendError, ConfigError, EngineProtocolError
from tierkv.stack.stack import Stack
from tierkv.testing.faults import hang_until
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.engine import StepOutput

PROMPTS = prompts_of(31, 3)
OTHERS = prompts_of(32, 3)


def disk(place: Path, name: str = "disk", backend: str = "disk") -> dict[str, Any]:
    """A table for a tier on disk."""
    return {
        "name": name, "backend": backend, "path": str(place / name), "capacity": "8MiB", "min_free_bytes": 0,
    }  # fmt: skip


def step_until(stack: Stack, condition: Callable[[], bool]) -> None:
    """Step an idle engine while it has pending work."""
    for _ in range(20_000):
        if condition():
            return
        stack.build_connector_meta(StepOutput())
        threading.Event().wait(0.001)
    raise AssertionError("the condition never became true")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate for hanging calls; opened at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def loaded(stack: Stack, tier: str) -> int:
    """Chunks read from a tier."""
    return stack.metrics.counters.promotions[tier]


def test_an_attached_tier_serves_what_it_held_and_takes_new_chunks(
    tmp_path: Path, expected: Callable[..., list[list[int]]]
) -> None:
    """A disk filled by an earlier stack is attached to one in service: its chunks are hits, and new ones are written to
    it.
    """
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as first:
        serve(first, PROMPTS)
    with opened(stack_config(tmp_path, tiers=[])) as stack:
        change = stack.tiers.attach(disk(tmp_path))
        assert not change.done
        assert stack.tiers.names == ()
        assert stack.has_pending_work()
        stack.build_connector_meta(StepOutput())
        assert change.done
        assert stack.tiers.names == ("disk",)
        assert not stack.has_pending_work()
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert loaded(stack, "disk") > 0
        assert serve(stack, OTHERS) == expected(OTHERS)
        assert stack.flush()
        assert stack.tiers.stats()["disk"]["bytes_written"] > 0
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as last:
        serve(last, OTHERS)
        assert loaded(last, "disk") > 0, "what was stored after the tier came is not there"


def test_a_detached_tier_is_a_miss_and_may_come_back(tmp_path: Path, expected: Callable[..., list[list[int]]]) -> None:
    """A tier is detached for repairs. Its files are unlocked at once and its chunks are misses; attached again, they
    are hits.
    """
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.reset_cache()
        change = stack.tiers.detach("disk")
        step_until(stack, lambda: change.done)
        assert stack.tiers.names == ()
        assert stack.tiers.stats() == {}
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert loaded(stack, "disk") == 0
        stack.reset_cache()
        stack.tiers.attach(disk(tmp_path))  # refused if its lock were still held
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert loaded(stack, "disk") > 0


def test_tiers_are_asked_in_the_order_in_which_they_stand(tmp_path: Path) -> None:
    """A faster tier is placed ahead of a slower one, and chunks in both are read from it."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "slow")])) as stack:
        stack.tiers.attach(disk(tmp_path, "fast"), before="slow")
        serve(stack, PROMPTS)
        assert stack.tiers.names == ("fast", "slow")
        assert stack.flush()
        stack.reset_cache()
        serve(stack, PROMPTS)
        assert loaded(stack, "fast") > 0
        assert loaded(stack, "slow") == 0
        change = stack.tiers.detach("fast")
        step_until(stack, lambda: change.done)
        stack.reset_cache()
        serve(stack, PROMPTS)
        assert loaded(stack, "slow") > 0


def test_events_say_that_a_detached_tier_is_empty(tmp_path: Path) -> None:
    """Routers that follow events must not send requests to chunks that this engine can no longer reach."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        stack.flush()
        stack.events.take()
        change = stack.tiers.detach("disk")
        step_until(stack, lambda: change.done)
        events = [event for event in stack.events.take() if event.tier == "disk"]
        assert [event.kind for event in events] == [CacheEventKind.CLEARED]


def test_a_tier_that_hangs_leaves_the_stack_in_service(
    tmp_path: Path, faults: Faults, gate: threading.Event, expected: Callable[..., list[list[int]]]
) -> None:
    """A hung disk is a reason to detach. Requests continue at once; the change is done when the last call has ended."""
    registry = faults.registry()
    table = disk(tmp_path, "bad", "faulty")
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as stack:
        faults.last.add("write", hang_until(gate))
        serve(stack, PROMPTS[:1])
        change = stack.tiers.detach("bad", timeout_s=0.05)
        step_until(stack, lambda: stack.tiers.names == ())
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert not change.done, "a call still hangs: its slots are not free, and the tier has not left"
        assert not change.wait(0.01)
        gate.set()
        step_until(stack, lambda: change.done)
        assert serve(stack, OTHERS) == expected(OTHERS)
        assert stack.flush()


@pytest.mark.parametrize("timeout_s", [None, "5", math.inf])
def test_a_detachment_without_a_time_changes_nothing(tmp_path: Path, timeout_s: Any) -> None:
    """The tier left the stack, and kept its files and its lock until the close: the step failed half-way."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        with pytest.raises(EngineProtocolError, match=r"detach: timeout_s = .*: give a finite number"):
            stack.tiers.detach("disk", timeout_s=timeout_s)
        with pytest.raises(EngineProtocolError, match=r"detach: name = \['disk'\]: give the name"):
            stack.tiers.detach(["disk"])  # type: ignore[arg-type]  # on purpose
        assert not stack.has_pending_work()
        assert stack.tiers.names == ("disk",)


def test_a_failed_attachment_changes_nothing(tmp_path: Path, faults: Faults) -> None:
    """Bad tables, taken names and tiers that cannot be opened raise in the caller; the stack is unchanged."""
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)]), plugins=registry) as stack:
        with pytest.raises(ConfigError, match="capasity"):
            stack.tiers.attach({**disk(tmp_path, "new"), "capasity": "1GiB"})
        with pytest.raises(EngineProtocolError, match="'disk' already"):
            stack.tiers.attach(disk(tmp_path))
        with pytest.raises(EngineProtocolError, match=r"before='slow'.*there are: disk"):
            stack.tiers.attach(disk(tmp_path, "new"), before="slow")
        taken = {**disk(tmp_path, "new"), "path": str(tmp_path / "disk")}
        with pytest.raises(BackendError):
            stack.tiers.attach(taken)
        assert stack.tiers.names == ("disk",)
        assert not stack.has_pending_work()


def test_a_tier_whose_scan_fails_is_closed_again(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that cannot be read would make a full tier look empty; its lock must be released."""
    registry = faults.registry()
    table = disk(tmp_path, "bad", "faulty")
    with opened(stack_config(tmp_path, tiers=[]), plugins=registry) as stack:

        def scan(_: object) -> object:
            raise OSError("no index")

        with monkeypatch.context() as patch:
            patch.setattr("tierkv.testing.faults.FaultyBackend.scan", scan)
            with pytest.raises(BackendError, match="no index"):
                stack.tiers.attach(table)
        change = stack.tiers.attach(table)
        stack.build_connector_meta(StepOutput())
        assert change.done


def test_an_unknown_name_is_refused_at_once(tmp_path: Path) -> None:
    """A misspelt tier looked detached to an operator who did not wait; a tier that went meanwhile raises later."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        with pytest.raises(EngineProtocolError, match=r"'dsik' cannot be detached: .*; there are: disk"):
            stack.tiers.detach("dsik")
        first, second = stack.tiers.detach("disk"), stack.tiers.detach("disk")
        step_until(stack, lambda: first.done)
        with pytest.raises(EngineProtocolError, match="no lower tier 'disk'; there are: none"):
            second.wait(1.0)


def test_two_attachments_at_once_under_one_name(tmp_path: Path) -> None:
    """Both were opened before either was in service: the second is refused and closed, and its change raises."""
    with opened(stack_config(tmp_path, tiers=[])) as stack:
        first = stack.tiers.attach(disk(tmp_path))
        second = stack.tiers.attach({**disk(tmp_path), "path": str(tmp_path / "other")})
        stack.build_connector_meta(StepOutput())
        assert first.wait(1.0)
        with pytest.raises(EngineProtocolError, match="already"):
            second.wait(1.0)
        assert stack.tiers.names == ("disk",)


def test_a_closed_stack_fails_pending_changes(tmp_path: Path) -> None:
    """A wait for a change must not last for ever, and no backend may stay open."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "first")])) as stack:
        stack.tiers.attach(disk(tmp_path))
        change = stack.tiers.detach("first")
    assert change.wait(5.0)
    with pytest.raises(EngineProtocolError, match="closed"):
        stack.tiers.attach(disk(tmp_path, "late"))
    with pytest.raises(EngineProtocolError, match="closed"):
        stack.tiers.detach("disk").wait(5.0)
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path), disk(tmp_path, "first")])) as again:
        assert again.tiers.names == ("disk", "first")


def test_changes_under_load(tmp_path: Path, expected: Callable[..., list[list[int]]]) -> None:
    """Another thread attaches and detaches continuously while prompts are served: every answer is right."""
    stop = threading.Event()
    done: list[int] = []
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:

        def change() -> None:
            while not stop.is_set():
                come = stack.tiers.attach(disk(tmp_path, "guest"), before="disk")
                while not (come.wait(0.05) or stop.is_set()):
                    pass
                if stop.is_set():
                    return
                go = stack.tiers.detach("guest", timeout_s=0.5)
                while not (go.wait(0.05) or stop.is_set()):
                    pass
                done.append(1)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for turn in range(40):
                prompts = PROMPTS if turn % 2 else OTHERS
                assert serve(stack, prompts) == expected(prompts)
                if len(done) >= 3:
                    break
                stack.reset_cache()
        finally:
            stop.set()
            thread.join(10.0)
        assert not thread.is_alive()
        assert len(done) >= 3, "nothing changed while prompts were served"


def test_a_reused_name_has_one_series(tmp_path: Path, faults: Faults, gate: threading.Event) -> None:
    """A hung tier is replaced by one of the same name. Two series of one name would make the whole scrape invalid."""
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "bad", "faulty")]), plugins=registry) as stack:
        faults.last.add("write", hang_until(gate))
        serve(stack, PROMPTS[:1])
        stack.tiers.detach("bad", timeout_s=0.05)
        step_until(stack, lambda: stack.tiers.names == ())
        stack.tiers.attach({**disk(tmp_path, "bad"), "path": str(tmp_path / "other")})
        step_until(stack, lambda: stack.tiers.names == ("bad",))
        serve(stack, OTHERS)
        assert stack.flush(), "a flush must not wait for a detached tier"
        labels = [(metric.name, values) for metric, values, _ in stack.metrics.series()]
        assert len(labels) == len(set(labels))
        assert stack.tiers.stats()["bad"]["bytes_written"] > 0, "these are the old tier's counters"
        gate.set()


def test_slots_that_hang_in_a_tier_that_leaves_are_no_other_ones_share(
    tmp_path: Path, faults: Faults, gate: threading.Event
) -> None:
    """Writes may pin half of the host tier at most. If each replaced hung tier kept its own half, the second one would
    take the last slot from requests.
    """
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "bad", "faulty")]), plugins=registry) as stack:
        faults.last.add("write", hang_until(gate))
        (bad,) = stack._core.wiring.manager.tiers
        share = bad.queue_chunks_max
        serve(stack, PROMPTS)
        held = bad.residency.num_writing
        assert held
        stack.tiers.detach("bad", timeout_s=0.01)
        change = stack.tiers.attach(disk(tmp_path, "good"))
        step_until(stack, lambda: change.done)
        (good,) = stack._core.wiring.manager.tiers
        assert good.queue_chunks_max == max(1, share - held)
        gate.set()
        step_until(stack, lambda: "bad" not in stack.tiers.stats())
        assert good.queue_chunks_max == share


def test_a_tier_without_a_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise 3: threads and files run out. The change raises; the engine's thread continues, and the name is free when
    threads are available again.
    """
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "first")])) as stack:
        change = stack.tiers.attach(disk(tmp_path))

        def none_left(*_: object) -> object:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(stack._core.wiring.dispatcher, "_open_lane", none_left)
            patch.setattr(stack._core.wiring.changes._unused, "_spawn", none_left)
            stack.build_connector_meta(StepOutput())
            (refused,) = stack._core.wiring.changes._unused.waiting
            closed = threading.Event()
            patch.setattr(refused.backend, "close", closed.set)
            stack.build_connector_meta(StepOutput())
            assert not closed.is_set()
            patch.undo()
            patch.setattr(refused.backend, "close", closed.set)
            stack.build_connector_meta(StepOutput())
            assert closed.wait(30.0), "a tier that stays open is locked until the engine ends"
        with pytest.raises(EngineProtocolError, match="can't start new thread"):
            change.wait(1.0)
        assert stack.tiers.names == ("first",)
        serve(stack, PROMPTS)
        with monkeypatch.context() as patch:
            change = stack.tiers.detach("first")
            (state,) = stack._core.wiring.dispatcher._tier_states.values()
            patch.setattr(state.lane, "_spawn", none_left)
            step_until(stack, lambda: not state.is_busy)
            stack.build_connector_meta(StepOutput())
            assert not change.done
        step_until(stack, lambda: change.done)
        serve(stack, OTHERS)
