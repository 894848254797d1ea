"""Chunks of a prompt that a user wants gone: absent at once, deleted from every tier soon, and not for ever."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stack_bed import Faults

from tierkv import open_stack
from tierkv.errors import EngineProtocolError
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, HandRequest, Prompt, engine_spec
from tierkv.testing.faults import raise_error

PROMPT, OTHER = Prompt(1, 6), Prompt(2, 3)


def tiers_of(place: Path) -> list[dict[str, Any]]:
    """A disk, and objects that other stacks share."""
    disk = {"name": "disk", "backend": "faulty", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    return [disk, {"name": "objects", "backend": "fsspec", "url": f"file://{place}/objects", "presence_ttl_s": 0}]


@contextmanager
def engine_on(place: Path, faults: Faults, *, tiers: int = 2, **more: Any) -> Iterator[HandEngine]:
    """An engine over a host tier and some of the tiers."""
    table = [{**tier, **more} for tier in tiers_of(place)[:tiers]]
    config = {"host": {"capacity": 24 * SLOT_BYTES}, "lookup": {"recompute": "off"}, "tiers": table}
    with open_stack(config, engine_spec(), plugins=faults.registry()) as stack:
        yield HandEngine(stack)


def forget(engine: HandEngine, prompt: Prompt) -> int:
    """Forget a prompt, and step until nothing of it is left."""
    count = engine.stack.forget(HandRequest("forgotten", prompt))
    engine.step_until(lambda: not engine.stack.num_forgetting, "the end of the deletions")
    return count


@pytest.mark.parametrize("tiers", [0, 1, 2])
def test_a_forgotten_prompt_is_in_no_tier(tmp_path: Path, tiers: int) -> None:
    """Neither here nor after a restart; and nothing else is lost."""
    faults = Faults()
    with engine_on(tmp_path, faults, tiers=tiers) as engine:
        for prompt in (PROMPT, OTHER):
            engine.store(prompt)
        assert engine.stack.flush()
        assert forget(engine, PROMPT) == 6
        assert engine.load(PROMPT) == 0
        assert engine.load(OTHER) == 3
        assert engine.stack.tiers.content()["host"].chunks == 3
        assert [content.chunks for name, content in engine.stack.tiers.content().items() if name == "disk"] in ([], [3])
    with engine_on(tmp_path, faults, tiers=tiers) as engine:
        assert engine.load(PROMPT) == 0
        assert engine.load(OTHER) == (3 if tiers else 0)
    objects = [path for path in (tmp_path / "objects").rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert len(objects) == (3 if tiers == 2 else 0), "the shared tier has the other prompt only"


def test_it_is_absent_before_the_first_step(tmp_path: Path) -> None:
    """The user's next question must not hit what was just forgotten, however slow the disk deletes."""
    with engine_on(tmp_path, Faults(), tiers=1) as engine:
        engine.store(PROMPT)
        engine.stack.flush()
        engine.stack.forget(HandRequest("forgotten", PROMPT))
        assert engine.stack.num_forgetting == 6
        assert engine.load(PROMPT) == 0


def test_a_forgotten_prompt_may_be_stored_again(tmp_path: Path) -> None:
    """Forgetting is no ban: a later request stores the prompt like any other, also before old copies are deleted."""
    with engine_on(tmp_path, Faults(), tiers=1) as engine:
        engine.store(PROMPT)
        engine.stack.flush()
        engine.stack.forget(HandRequest("forgotten", PROMPT))
        engine.store(PROMPT)
        engine.step_until(lambda: not engine.stack.num_forgetting, "the end of the deletions")
        assert engine.load(PROMPT) == 6
        assert forget(engine, PROMPT) == 6
        engine.store(PROMPT)
        assert engine.stack.flush()
    with engine_on(tmp_path, Faults(), tiers=1) as engine:
        assert engine.load(PROMPT) == 6


def test_only_the_tokens_of_the_request_are_forgotten(tmp_path: Path) -> None:
    """A shorter prompt forgets the head that a longer one shares with it: the rest is not found without it."""
    with engine_on(tmp_path, Faults(), tiers=1) as engine:
        engine.store(PROMPT)
        engine.stack.flush()
        assert forget(engine, PROMPT.first(2)) == 2
        assert engine.load(PROMPT) == 0
        assert engine.stack.tiers.content()["disk"].chunks == 4


def test_a_deletion_that_fails_is_repeated(tmp_path: Path) -> None:
    """One fault of the disk must not bring a forgotten prompt back."""
    faults = Faults()
    with engine_on(tmp_path, faults, tiers=1, retries=0, breaker_failures=1000) as engine:
        engine.store(PROMPT)
        engine.stack.flush()
        faults.last.add("delete", raise_error(lambda: OSError(errno.EIO, "no")), times=2)
        forget(engine, PROMPT)
        assert engine.stack.tiers.content()["disk"].chunks == 0


def test_a_read_only_tier_refuses(tmp_path: Path) -> None:
    """A tier that this stack may not write keeps its chunks; an answer that claims otherwise would be false."""
    with engine_on(tmp_path, Faults(), tiers=1) as engine:
        engine.store(PROMPT)
    table = {**tiers_of(tmp_path)[0], "backend": "disk", "write": "read_only"}
    config = {"host": {"capacity": 24 * SLOT_BYTES}, "lookup": {"recompute": "off"}, "tiers": [table]}
    with open_stack(config, engine_spec()) as stack:
        engine = HandEngine(stack)
        with pytest.raises(EngineProtocolError, match="'disk' is read-only"):
            stack.forget(HandRequest("forgotten", PROMPT))
        assert engine.load(PROMPT) == 6
