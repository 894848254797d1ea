"""Events of an open stack as a router receives them: described by tokens, with a real engine and a real disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stack_bed import ANSWER, ENGINE, opened, prompts_of, stack_config

from tierkv.stack.stack import Stack
from tierkv.stack.views.events import StackEvents
from tierkv.types.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from tierkv.types.engine import StepOutput

pytest.importorskip("torch")


def events_of(stack: Stack, prompts: list[list[int]]) -> list[BlockEvent]:
    """Serve prompts and take events after each step, as a publishing engine does. The reference engine's own call gets
    none.
    """
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - torch

    stack.events.take = list  # type: ignore[method-assign]
    engine = Engine(ENGINE, connector=stack)
    received: list[BlockEvent] = []
    for prompt in prompts:
        engine.add_request(prompt, ANSWER)
    while engine.has_work:
        engine.step()
        received += stack.events.take_block_events()
    stack.flush()
    return received + stack.events.take_block_events()


def described(**changes: Any) -> dict[str, Any]:
    """Description with the switch on."""
    return {"events": {"self_describing": True, **changes}}


def test_a_router_receives_tokens_and_tiers(tmp_path: Path) -> None:
    """From the tokens of events alone a router finds the tier of each prompt. Chunks evicted from the host tier stay
    known on disk.
    """
    prompts = prompts_of(3, 6)
    with opened(stack_config(tmp_path, host_slots=12, **described())) as stack:
        events = events_of(stack, prompts)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert {event.tier for event in stored} == {"host", "disk", "objects"}
    for prompt in prompts:
        chunks = {tuple(prompt[i : i + 16]) for i in range(0, 112, 16)}
        assert chunks <= {event.token_ids for event in stored if event.tier == "host"}
    removed = {block for event in events if isinstance(event, BlockRemoved) and event.tier == "host"
            for block in event.block_hashes}  # fmt: skip
    assert removed
    assert removed <= {block for event in stored if event.tier == "host" for block in event.block_hashes}
    assert all(len(event.block_hashes) == 2 and event.block_size == 8 for event in stored)


def test_media_are_words_that_routers_know(tmp_path: Path) -> None:
    """A tier may have any name. A router that does not know a medium gives it the credit of a GPU."""
    config = stack_config(tmp_path, host_slots=12, **described())
    config["tiers"][0]["name"] = "scratch-nvme"
    with opened(config) as stack:
        events = events_of(stack, prompts_of(3, 6))
        stack.reset_cache()
        stack.build_connector_meta(StepOutput())
        events += stack.events.take_block_events()
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    media = {(event.tier, event.medium) for event in events}
    assert media == {("host", "CPU"), ("scratch-nvme", "DISK"), ("objects", "STORAGE")}


def test_payloads_are_forgotten_after_a_reset(tmp_path: Path) -> None:
    """The event of a reset is described at one cost, so the steps after it must free the payloads."""
    with opened(stack_config(tmp_path, tiers=[], **described())) as stack:
        events_of(stack, prompts_of(1, 3))
        payloads = stack.events._queue._block_events
        assert len(payloads)
        stack.reset_cache()
        stack.build_connector_meta(StepOutput())
        assert not len(payloads)


def test_a_later_process_describes_what_it_can(tmp_path: Path) -> None:
    """It finds chunks on disk that another process stored: their events have their own hash and no tokens."""
    prompts = prompts_of(4, 2)
    with opened(stack_config(tmp_path)) as stack:
        events_of(stack, prompts)
    with opened(stack_config(tmp_path, **described())) as stack:
        events = events_of(stack, prompts)
        undescribed = stack.metrics.counters.events_undescribed
    placeholders = [event for event in events if isinstance(event, BlockStored) and not event.token_ids]
    assert placeholders
    assert {(event.block_size, len(event.block_hashes)) for event in placeholders} == {(0, 1)}
    assert undescribed >= len(placeholders)


def test_without_the_switch_events_are_placeholders(tmp_path: Path) -> None:
    """The default costs nothing; an engine that takes described events then receives hashes only."""
    with opened(stack_config(tmp_path)) as stack:
        events = events_of(stack, prompts_of(5, 1))
        assert not stack.metrics.counters.events_undescribed
    assert events
    assert all(event.block_size == 0 for event in events if isinstance(event, BlockStored))


def test_disabled_events_are_not_kept(tmp_path: Path) -> None:
    """An engine that takes no events must not accumulate them."""
    with opened(stack_config(tmp_path, **described(enabled=False))) as stack:
        assert events_of(stack, prompts_of(6, 1)) == []
        assert StackEvents.take(stack.events) == []
        assert not stack.metrics.counters.events_dropped
