"""Reset of every tier: chunks stored before it are not found from the next lookup on, and all of them are deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stack_bed import Faults, opened, prompts_of, serve, stack_config

from tierkv.errors import BackendError, EngineProtocolError
from tierkv.stack.stack import Stack
from tierkv.testing.faults import raise_error
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.engine import StepOutput

PROMPTS = prompts_of(41, 3)


def disk(place: Path, backend: str = "disk") -> dict[str, object]:
    """A table for a tier on disk."""
    return {"name": "disk", "backend": backend, "path": str(place / "d"), "capacity": "8MiB", "min_free_bytes": 0}


def steps(stack: Stack, count: int = 5000) -> None:
    """Step an idle engine until its lower tier is empty."""
    for _ in range(count):
        if not stack._core.wiring.manager.tiers[0].phase.emptying:
            return
        stack.build_connector_meta(StepOutput())
        time.sleep(0.002)


def test_another_scope_is_refused(tmp_path: Path) -> None:
    """A misspelt scope once emptied the host tier alone, and chunks of the old weights were found on disk."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        stack.events.take()
        with pytest.raises(EngineProtocolError, match="reset_cache: scope = 'al': give 'host', or 'all'"):
            stack.reset_cache("al")  # type: ignore[arg-type]  # the mistake
        assert not [event for event in stack.events.take() if event.kind is CacheEventKind.CLEARED]


def test_all_tiers_are_emptied(tmp_path: Path, expected: Callable[..., list[list[int]]]) -> None:
    """An operator who empties the cache must not find old chunks again, neither at once nor after a restart."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.events.take()
        stack.reset_cache("all")
        cleared = [event.tier for event in stack.events.take() if event.kind is CacheEventKind.CLEARED]
        assert sorted(cleared) == ["disk", "host"]
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.promotions["disk"] == 0
        stack.reset_cache("all")
        steps(stack)
        assert len(stack._core.wiring.manager.tiers[0].residency) == 0
        assert stack._core.wiring.manager.tiers[0].residency.used_bytes == 0
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as again:
        serve(again, PROMPTS)
        assert again.metrics.counters.promotions["disk"] == 0


def test_an_emptied_tier_is_in_use_again(tmp_path: Path) -> None:
    """A reset does not detach: chunks stored after it are written and loaded."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.reset_cache("all")
        steps(stack)
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.reset_cache()
        serve(stack, PROMPTS)
        assert stack.metrics.counters.promotions["disk"] > 0


def test_writes_under_way_are_deleted_too(tmp_path: Path) -> None:
    """A chunk that reaches the disk a moment after the reset was stored before it."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        stack.reset_cache("all")  # nothing was flushed: cascades wait or are being written
        steps(stack)
        assert len(stack._core.wiring.manager.tiers[0].residency) == 0


def test_a_tier_that_cannot_delete_answers_nothing(tmp_path: Path, faults: Faults) -> None:
    """Old chunks must not be found again because a disk fails to delete them; they are deleted when it recovers."""
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path, "faulty")]), plugins=registry) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        rule = faults.last.add("delete", raise_error(lambda: BackendError("read-only file system")))
        stack.reset_cache("all")
        steps(stack, 10)
        serve(stack, PROMPTS)
        assert stack.metrics.counters.promotions["disk"] == 0
        assert len(stack._core.wiring.manager.tiers[0].residency) > 0
        faults.last.rules.remove(rule)
        stack.reset_cache()
        steps(stack)
        assert stack._core.wiring.manager.tiers[0].phase.emptying is False


@pytest.mark.parametrize("change", [{"backend": "fsspec", "url": "file://{}/o"}, {"write": "read_only"}])
def test_what_is_not_ours_is_not_emptied(tmp_path: Path, change: dict[str, str]) -> None:
    """A bucket has other users, too. To empty only some tiers would look like a full reset: nothing happens."""
    table = {**disk(tmp_path), **change}
    if "url" in table:
        table = {"name": "disk", "backend": "fsspec", "url": f"file://{tmp_path}/o"}
    with opened(stack_config(tmp_path, tiers=[table])) as stack:
        serve(stack, PROMPTS)
        stack.flush()
        stack.events.take()
        with pytest.raises(EngineProtocolError, match=r"tier 'disk' is .* namespace.epoch"):
            stack.reset_cache("all")
        assert stack.events.take() == []
        serve(stack, PROMPTS)
        assert stack.metrics.counters.chunks_loaded > 0


@pytest.mark.parametrize("change", [{"backend": "fsspec"}, {"write": "read_only"}])
def test_what_is_not_ours_goes_out_of_service_at_once(tmp_path: Path, change: dict[str, str]) -> None:
    """New weights must find no chunk of the old ones there, and write none under their name; others keep theirs."""
    foreign = {**disk(tmp_path), "name": "foreign", "path": str(tmp_path / "f"), **change}
    if change.get("backend") == "fsspec":
        foreign = {"name": "foreign", "backend": "fsspec", "url": f"file://{tmp_path}/o"}
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path), foreign])) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.build_connector_meta(StepOutput())
        written = len(list((tmp_path / "o").rglob("*")))
        assert stack.tiers.detach_not_ours() == ("foreign",)
        assert stack.tiers.names == ("disk",)
        stack.reset_cache("all")
        read = dict(stack.metrics.counters.promotions)
        serve(stack, PROMPTS)
        assert stack.flush()
        assert dict(stack.metrics.counters.promotions) == read
        assert len(list((tmp_path / "o").rglob("*"))) == written
        assert stack.tiers.detach_not_ours() == ()


def test_an_orderly_close_ends_what_a_reset_began(tmp_path: Path) -> None:
    """A cache that is reset right before shutdown must be empty at the next start."""
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.reset_cache("all")
        assert stack.close()
    with opened(stack_config(tmp_path, tiers=[disk(tmp_path)])) as again:
        assert len(again._core.wiring.manager.tiers[0].residency) == 0


def test_a_tier_that_could_not_be_listed_is_emptied_too(tmp_path: Path, faults: Faults) -> None:
    """The disk is not readable while the stack opens, and the operator empties the cache. No earlier chunk may come
    back: neither when the disk answers again, nor in the next process."""
    table = {**disk(tmp_path, "faulty"), "breaker_cooldown_s": 0.05}
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
    faults.prepare = lambda backend: backend.add("scan", raise_error(lambda: OSError("not mounted")))
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as stack:
        (tier,) = stack._core.wiring.manager.tiers
        stack.reset_cache("all")
        steps(stack, 30)
        assert tier.phase.emptying
        faults.last.rules.clear()
        steps(stack)
        assert not tier.phase.emptying
        serve(stack, PROMPTS)
        assert stack.metrics.counters.promotions["disk"] == 0
        stack.reset_cache("all")
        steps(stack)
    faults.prepare = None
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as again:
        assert len(again._core.wiring.manager.tiers[0].residency) == 0


def test_a_tier_that_could_not_be_listed_serves_again(tmp_path: Path, faults: Faults) -> None:
    """Promise 3: when the cause ends, the tier works again without a restart, with what it held."""
    table = {**disk(tmp_path, "faulty"), "breaker_cooldown_s": 0.05}
    registry = faults.registry()
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
    faults.prepare = lambda backend: backend.add("scan", raise_error(lambda: OSError("not mounted")), times=2)
    with opened(stack_config(tmp_path, tiers=[table]), plugins=registry) as stack:
        (tier,) = stack._core.wiring.manager.tiers
        for _ in range(5000):
            if tier.knows_content and tier.phase.usable:
                break
            stack.build_connector_meta(StepOutput())
            time.sleep(0.002)
        assert len(tier.residency) > 0
        serve(stack, PROMPTS)
        assert stack.metrics.counters.promotions["disk"] > 0
