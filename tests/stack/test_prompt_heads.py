"""A prompt longer than a tier, over a real disk: the next process finds its head, whatever the policy.

Before chunks entered policies in the order of their prompt, the next process found none of forty chunks, or a few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierkv_disk
from tierkv.policies.builtin import POLICY_PLUGINS
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandRequest, Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.types.engine import ScheduledRequest, StepOutput

ROOM = 26
LONG = Prompt(1, 40)
POLICIES = sorted(plugin.name for plugin in POLICY_PLUGINS)


def opened(place: Path, policy: str, write: str = "through", host_slots: int = 64, **options: Any) -> SmallStack:
    """Stack over a disk tier for :data:`ROOM` chunks."""
    return SmallStack(
        tierkv_disk.PLUGIN,
        lambda path: tierkv_disk.DiskOptions(path=path, min_free_bytes=0),
        place / "disk",
        capacity_bytes=ROOM * SLOT_BYTES,
        host_slots=host_slots,
        tier={"policy": policy, "write": write},
        **options,
    )


class Run:
    """Request whose prompt is computed in several steps."""

    def __init__(self, stack: SmallStack, prompt: Prompt, loaded: int = 0) -> None:
        self.stack = stack
        self.request: HandRequest = stack.arrive(prompt)
        self.left = self.request.num_tokens
        hit = stack.lookup(self.request)
        assert hit >= loaded
        stack.allocate(self.request, 0)

    def step(self, tokens: int) -> None:
        """Compute some tokens, and let the writes of their chunks end."""
        done, tokens = self.request.num_tokens - self.left, min(tokens, self.left)
        ids = (tuple(block.block_id for block in self.request.blocks),) if not done else ((),)
        entry = ScheduledRequest(self.request.request_id, done, tokens, ids, replaces_table=not done)
        self.stack.step(StepOutput((entry,)), lambda: self.stack.compute(self.request, 0))
        self.left -= tokens
        # A chunk that is not copied yet is not written either, and a small host tier has no slots for further ones.
        self.stack.step_until(lambda: not self.stack.stack.has_pending_work(), "the copies of a step")
        self.stack.settle()

    def end(self) -> None:
        """End the request."""
        self.stack.end(self.request)
        self.stack.step_until(lambda: not self.stack.stack.has_pending_work(), "the end of a request")
        self.stack.settle()


def store(stack: SmallStack, prompt: Prompt, steps: int) -> None:
    """Compute a prompt in ``steps`` engine steps, and end its request."""
    run = Run(stack, prompt)
    size = -(-run.left // steps)
    while run.left:
        run.step(size)
    run.end()


@pytest.mark.parametrize("write", ["through", "on_reuse", "back"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_process_finds_the_head(tmp_path: Path, policy: str, write: str) -> None:
    """Forty chunks, stored in eight steps, into a disk tier for 26: the head is there, and its frames are whole."""
    with opened(tmp_path, policy, write) as stack:
        for _ in range(2 if write == "on_reuse" else 1):
            store(stack, LONG, steps=8)
    with opened(tmp_path, policy, write) as stack:
        assert stack.load(LONG) >= ROOM - 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_tier_that_is_smaller_still(tmp_path: Path, policy: str) -> None:
    """Every chunk passes the host tier on its way down, so the host tier refuses none for its head."""
    with opened(tmp_path, policy, host_slots=16) as stack:
        store(stack, LONG, steps=8)
        refused = stack.stack.metrics.counters.admissions_refused
        assert refused[TESTED] == LONG.chunks - ROOM
        assert not refused["host"]
    with opened(tmp_path, policy) as stack:
        assert stack.load(LONG) >= ROOM - 2


@pytest.mark.parametrize("policy", POLICIES)
def test_two_prompts_in_turn(tmp_path: Path, policy: str) -> None:
    """Two requests compute their prompts at once, and both do not fit: the tier is full of heads, not of tails."""
    other = Prompt(2, 40)
    with opened(tmp_path, policy) as stack:
        runs = [Run(stack, prompt) for prompt in (LONG, other)]
        while any(run.left for run in runs):
            for run in runs:
                run.step(5 * 16)
        for run in runs:
            run.end()
    with opened(tmp_path, policy) as stack:
        assert stack.load(LONG) + stack.load(other) >= ROOM - 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_turn_does_not_evict_the_first(tmp_path: Path, policy: str) -> None:
    """A chat goes on: the first turn has 20 chunks, the second 20 more. They must not displace the first."""
    with opened(tmp_path, policy) as stack:
        store(stack, Prompt(1, 20), steps=4)
        store(stack, LONG, steps=8)
    with opened(tmp_path, policy) as stack:
        assert stack.load(LONG) >= ROOM - 2


def test_an_ended_prompt_makes_way(tmp_path: Path) -> None:
    """Only a prompt's own head is kept from its tail: the next prompt finds room as before."""
    other = Prompt(2, 20)
    with opened(tmp_path, "lru") as stack:
        store(stack, LONG, steps=8)
        store(stack, other, steps=4)
    with opened(tmp_path, "lru") as stack:
        assert stack.load(other) == 20
        assert 0 < stack.load(LONG) <= ROOM - 20
