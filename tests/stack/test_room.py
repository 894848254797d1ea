"""A backend that needs part of its capacity itself states the rest, and the stack stays within it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stack_bed import ENGINE, Faults, opened, prompts_of, serve, stack_config

from tierkv.errors import PluginError
from tierkv.stack.opening import open_stack
from tierkv.testing.faults import FaultyBackend

pytestmark = pytest.mark.needs_torch

ROOM = 10 * 16 * 1024


def config(place: Path) -> dict[str, Any]:
    """A disk tier with fault injection and more capacity than any test fills."""
    tier = {"backend": "faulty", "name": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    return stack_config(place, tiers=[tier])


@pytest.fixture
def limited_room(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Backends that state their room."""
    monkeypatch.setattr(FaultyBackend, "room_bytes", ROOM, raising=False)
    return monkeypatch


def test_room_is_the_limit(tmp_path: Path, limited_room: pytest.MonkeyPatch) -> None:
    """The sum of frames stays below it: chunks are evicted in time, and no write is refused."""
    with opened(config(tmp_path), plugins=Faults().registry()) as stack:
        serve(stack, [prompt for seed in range(3) for prompt in prompts_of(seed, 3, shared=0)])
        (tier,) = stack._core.wiring.manager.tiers
        assert tier.limits.capacity_bytes == ROOM
        assert 0.5 * ROOM < tier.residency.used_bytes <= ROOM
        assert stack.metrics.counters.writes_failed["disk"] == 0
    limited_room.undo()
    with opened(config(tmp_path), plugins=Faults().registry()) as stack:
        assert stack._core.wiring.manager.tiers[0].limits.capacity_bytes == 8 << 20, (
            "without a word of the backend, all of it"
        )


@pytest.mark.parametrize("said", [-1, 1.5, None, "much"])
def test_room_that_is_no_number_is_refused(tmp_path: Path, limited_room: pytest.MonkeyPatch, said: object) -> None:
    """A broken plugin is refused at open, by name, and its lock is released."""
    limited_room.setattr(FaultyBackend, "room_bytes", said)
    with pytest.raises(PluginError, match="room_bytes") as refused:
        open_stack(config(tmp_path), ENGINE.engine_spec(), plugins=Faults().registry())
    assert refused.value.tier == "disk"
    limited_room.undo()
    open_stack(config(tmp_path), ENGINE.engine_spec(), plugins=Faults().registry()).close(timeout_s=5.0)
