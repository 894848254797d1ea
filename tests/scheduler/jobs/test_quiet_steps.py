"""Running requests that are only counted: they may be left out of a step, and nothing else changes by it."""

from __future__ import annotations

import pytest
from core_parts import Core, make_core
from core_truth import BedRequest
from group_parts import window
from hypothesis import given
from hypothesis import strategies as st
from store_parts import chunk_indices

from tierkv.scheduler.limits import SchedulerLimits, StorePlanName
from tierkv.types.engine import GroupKind, GroupSpec, ScheduledRequest, StepOutput

BLOCK = 4
FULL = GroupSpec(BLOCK, (64,), GroupKind.FULL_ATTENTION)


class Decoder:
    """One request that decodes token by token; ``asks``: it is left out of each step that only counts."""

    def __init__(self, core: Core, prompt: int, *, asks: bool, **params: object) -> None:
        self.core, self.asks = core, asks
        self.request: BedRequest = core.arrive(prompt, **params)
        self.computed, self.blocks, self.left_out = prompt, -(-prompt // BLOCK), 0
        self.stored = self._step(ScheduledRequest("a", 0, prompt, self._ids(range(1, self.blocks + 1)), True))

    def _ids(self, blocks: range) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(100 * group + block for block in blocks) for group in range(len(self.core.geometry.groups)))

    def _step(self, *entries: ScheduledRequest) -> list[list[int]]:
        self.core.begin(self.core.now + 1)
        meta = self.core.scheduler.build_connector_meta(StepOutput(entries))
        self.core.scheduler.validate()
        stored = chunk_indices(self.core, self.request, meta)
        self.core.report(*[job.job_id for job in meta.stores])
        return [stored]

    def decode(self) -> None:
        """Compute one token."""
        self.request.extend([self.computed])
        new = range(self.blocks + 1, self.blocks + 1 + (self.computed % BLOCK == 0))
        self.blocks += len(new)
        self.core.begin(self.core.now + 1)
        if self.asks and not new and self.core.scheduler.advance("a", self.computed, 1):
            self.left_out += 1
            self.stored += self._step()
        else:
            self.stored += self._step(ScheduledRequest("a", self.computed, 1, self._ids(new)))
        self.computed += 1

    def finish(self) -> list[int]:
        """End the request. Returns the chunks that its end stores."""
        self.core.scheduler.request_finished(self.request, [])
        return self._step()[0]


PLANS: list[StorePlanName] = ["immediate", "eager"]


@given(
    prompt=st.integers(1, 20), tokens=st.integers(0, 30), plan=st.sampled_from(PLANS), prompt_only=st.booleans(),
    factor=st.sampled_from([1, 2, 3]), windowed=st.booleans(), most=st.none() | st.integers(0, 40),
)  # fmt: skip
def test_steps_that_leave_a_request_out_store_the_same_chunks(
    prompt: int, tokens: int, plan: StorePlanName, prompt_only: bool, factor: int, windowed: bool, most: int | None
) -> None:
    """The fast path must not lose a chunk, nor store it in another step."""
    groups = [FULL, window(2 * BLOCK, BLOCK)] if windowed else [FULL]
    runs = []
    for asks in (False, True):
        limits = SchedulerLimits(store_plan=plan, prompt_only=prompt_only)
        core = make_core(groups=groups, factor=factor, limits=limits)
        params = {} if most is None else {"max_offload_tokens": most}
        decoder = Decoder(core, prompt, asks=asks, **params)
        for _ in range(tokens):
            decoder.decode()
        runs.append((decoder.stored, core.record(decoder.request).computed_tokens, decoder.finish()))
    assert runs[0] == runs[1]


def test_most_steps_only_count() -> None:
    """Of four steps one brings a block, and one completes it: the other two are quiet."""
    decoder = Decoder(make_core(), 5, asks=True)
    for _ in range(40):
        decoder.decode()
    assert decoder.left_out == 20


@pytest.mark.parametrize("change", ["unknown", "waiting", "preempted", "asked again", "reset", "finished"])
def test_a_request_in_another_state_is_not_left_out(change: str) -> None:
    """Whatever has to be done for it would be lost."""
    core = make_core()
    decoder = Decoder(core, 5, asks=True)
    if change == "waiting":
        core.arrive(5, "b")
    elif change == "preempted":
        core.scheduler.build_connector_meta(StepOutput(preempted=frozenset({"a"})))
    elif change == "asked again":
        core.ask(decoder.request)
    elif change == "reset":
        core.scheduler.reset_cache()
    elif change == "finished":
        decoder.finish()
    name = {"unknown": "nobody", "waiting": "b"}.get(change, "a")
    assert not core.scheduler.advance(name, 5, 1)


def test_tokens_beyond_the_blocks_are_not_only_counted() -> None:
    """An engine that forgot to name a block gets its error in the step, not when the wrong bytes are stored."""
    core = make_core(limits=SchedulerLimits(prompt_only=True))
    Decoder(core, 5, asks=True)
    assert core.scheduler.advance("a", 5, 3)
    assert not core.scheduler.advance("a", 8, 1)
