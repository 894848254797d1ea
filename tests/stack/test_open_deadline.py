"""Backends that hang while they are opened: the stack opens without them, and what comes late is closed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stack_bed import opened, prompts_of, serve, stack_config
from unopened_disks import PATIENCE_S, HangingDisk

from tierkv.errors import BackendUnavailableError, DeadlineExceededError

Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(11, 2)


@pytest.fixture
def hanging() -> Iterator[HangingDisk]:
    """Disk whose open hangs until the test releases it, or ends."""
    disk = HangingDisk()
    yield disk
    disk.release()


def hanging_tier(place: Path) -> dict[str, Any]:
    """Description of the tier that hangs."""
    return {**stack_config(place / "slow")["tiers"][0], "name": "slow", "backend": "hanging", "open_deadline_s": 0.05}


@pytest.mark.needs_torch
def test_a_stack_opens_without_a_tier_that_hangs(
    tmp_path: Path, expected: Expected, hanging: HangingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine must start with a dead file system below it; its other tiers serve as ever."""
    config = stack_config(tmp_path)
    config["tiers"] = [hanging_tier(tmp_path), config["tiers"][0]]
    for _ in range(2):
        with opened(config, plugins=hanging.registry) as stack:
            assert stack.tiers.names == ("disk",)
            assert serve(stack, PROMPTS) == expected(PROMPTS)
            loaded = stack.metrics.counters.tokens_loaded["disk"]
            assert stack.close()
    assert loaded >= 112
    (first, _) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "event=tier_left_out tier=slow" in first.getMessage()
    assert "open_deadline_s" in first.getMessage()
    hanging.release()
    assert hanging.closed.wait(PATIENCE_S), "the backend that was opened late keeps its lock"


def test_an_attachment_that_hangs_is_refused(tmp_path: Path, hanging: HangingDisk) -> None:
    """The caller learns it; the same tier is attached once its cause is gone."""
    config = {**stack_config(tmp_path), "tiers": []}
    with opened(config, plugins=hanging.registry) as stack:
        with pytest.raises(DeadlineExceededError, match=r"not opened within 0\.05 seconds"):
            stack.tiers.attach(hanging_tier(tmp_path))
        hanging.release()
        assert hanging.closed.wait(PATIENCE_S)
        stack.tiers.attach({**hanging_tier(tmp_path), "open_deadline_s": PATIENCE_S})


def test_a_required_tier_that_hangs_stops_the_stack(tmp_path: Path, hanging: HangingDisk) -> None:
    """A stack that cannot serve without a tier says so at start."""
    config = {**stack_config(tmp_path), "tiers": [{**hanging_tier(tmp_path), "required": True}]}
    with pytest.raises(DeadlineExceededError), opened(config, plugins=hanging.registry):
        pass


def test_a_stack_opens_without_a_tier_that_is_in_use(
    tmp_path: Path, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    """Default: the engine serves, and the log names the tier, the cause and the way to make it an error. The tier is
    attached once its cause is gone.
    """
    config = stack_config(tmp_path)
    with opened(config) as owner, opened(config) as stack:
        assert stack.tiers.names == ("objects",)
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert owner.close()
        stack.tiers.attach(config["tiers"][0])
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert set(stack.tiers.names) == {"disk", "objects"}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "event=tier_left_out tier=disk" in record.getMessage()
    assert "required = true" in record.getMessage()
    required = {**config, "tiers": [{**config["tiers"][0], "required": True}]}
    with opened(required), pytest.raises(BackendUnavailableError, match="in use"), opened(required):
        pass


def test_a_place_with_other_data_is_refused(tmp_path: Path) -> None:
    """It is a mistake of the description, which no time heals: raised whether the tier is required or not, on the
    caller's thread, with the tier's name.
    """
    (tmp_path / "disk").write_text("no directory")
    with pytest.raises(OSError, match="disk") as caught, opened(stack_config(tmp_path)):
        pass
    assert getattr(caught.value, "tier", None) == "disk"
