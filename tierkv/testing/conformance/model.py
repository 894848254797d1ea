"""Hypothesis state machine that compares the backend with a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

KEYS = [make_key(number) for number in range(6)]
"""Number of keys; small, so that overwrites and deletes of stored keys are frequent."""


def run_against_a_dict(
    open_at: Callable[[Path], Session],
    new_place: Callable[[], Path],
    *,
    sizes: Sequence[int],
    examples: int,
    steps: int,
) -> None:
    """Play ``examples`` random histories of ``steps`` steps, each in a fresh place.

    Raises:
        AssertionError: with the shortest history that tells the backend from a dict.
    """

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.place = new_place()
            self.session = open_at(self.place)
            self.model: dict[Key, bytes] = {}
            self.version = 0

        @rule(writes=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(sizes), min_size=1))
        def write(self, writes: dict[Key, int]) -> None:
            self.version += 1
            frames = {key: make_frame(key, self.version, size) for key, size in writes.items()}
            self.session.put(frames)
            self.model.update(frames)

        @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1))
        def delete(self, keys: list[Key]) -> None:
            self.session.forget(keys)
            for key in keys:
                self.model.pop(key, None)

        @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1))
        def read(self, keys: list[Key]) -> None:
            assert self.session.read(keys) == [self.model.get(key) for key in keys]

        @precondition(lambda self: self.session.plugin.capabilities.durable)
        @rule()
        def reopen(self) -> None:
            self.session.close()
            self.session = open_at(self.place)
            assert self.session.read(KEYS) == [self.model.get(key) for key in KEYS]

        @invariant()
        def presence_agrees(self) -> None:
            batch = KEYS[: self.session.plugin.capabilities.preferred_batch]
            assert self.session.contains(batch) == [key in self.model for key in batch]
            if self.session.plugin.capabilities.scan:
                assert self.session.scan() == {key: len(frame) for key, frame in self.model.items()}

        def teardown(self) -> None:
            self.session.close()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
