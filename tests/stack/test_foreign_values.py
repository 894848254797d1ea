"""Every public call of a stack and of a worker, with a foreign value in the place of each argument.

The value is taken, or refused by a named error before anything changes. Calls are found by inspection, so a new one is
tried too: it needs a valid value for each of its parameters in :data:`VALID`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

import tierkv
from tierkv.errors import TierKVError
from tierkv.reference.block_pool import BlockPool
from tierkv.stack.stack import Stack
from tierkv.stack.staged import StagedStack
from tierkv.stack.views.events import StackEvents
from tierkv.stack.views.introspection import StackIntrospection
from tierkv.stack.views.measurements import StackMetrics
from tierkv.stack.views.tiers import StackTiers
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, HandRequest, Prompt, engine_spec
from tierkv.types.engine import ScheduledRequest, StepOutput
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.worker import Worker

PROMPT, OTHER = Prompt(1, 3), Prompt(2, 3)
LIVE = "live"
KEY = PROMPT.keys[0]
STACK = {"host": {"capacity": 16 * SLOT_BYTES}}

FOREIGN: tuple[Any, ...] = (
    None, True, -1, 1.5, "x", b"k", (), [None], [[]], [("x", None)], {"a": 1}, {1: None}, object(),
)  # fmt: skip
VALID: Mapping[str, Any] = {
    "request": HandRequest("new", OTHER), "request_id": LIVE, "num_computed_tokens": 0, "num_scheduled_tokens": 1,
    "blocks": [[1, 2, 3, 4]], "block_ids": [[1, 2, 3, 4]], "num_external_tokens": 0,
    "step": StepOutput((ScheduledRequest(LIVE, 0, 49, ((1, 2, 3, 4),), replaces_table=True),)),
    "output": WorkerOutput({1: 1}), "rank": 0, "scope": "host", "timeout_s": 0.0,
    "queue": BlockPool(8), "max_batched_tokens": 64, "job_ids": [1], "meta": ConnectorMeta(), "caches": [], "job": None,
    "params": None, "load_tiers": None, "key": KEY, "keys": [KEY], "end_token": 16, "chunks": [(KEY, 16)],
    "started": [LIVE], "preempted": [], "prompt_tokens": 0, "success": True, "table": {"backend": "disk"},
    "before": None, "name": "disk", "tier": "disk",
}  # fmt: skip
"""A value for each parameter, by its name."""

OWNERS: Mapping[str, tuple[type, Callable[[Any], object]]] = {
    "stack": (Stack, lambda stack: stack),
    "staged stack": (StagedStack, lambda stack: stack),
    "worker": (Worker, lambda stack: stack.worker),
    "tiers": (StackTiers, lambda stack: stack.tiers),
    "events": (StackEvents, lambda stack: stack.events),
    "metrics": (StackMetrics, lambda stack: stack.metrics),
    "introspection": (StackIntrospection, lambda stack: stack.introspection),
}
"""Class of an object with public calls, and how a stack leads to it."""


def calls_of(owner: str) -> Iterator[tuple[str, str]]:
    """Public calls of an object, each with each of its parameters."""
    if owner == "stack":  # an attribute: the scheduler's own method
        yield from (("advance", name) for name in ("request_id", "num_computed_tokens", "num_scheduled_tokens"))
    for name, function in inspect.getmembers(OWNERS[owner][0], inspect.isfunction):
        if not name.startswith("_"):
            yield from ((name, parameter) for parameter in list(inspect.signature(function).parameters)[1:])


def foreign_values(parameter: str) -> Iterator[Any]:
    """Values in the place of a valid one: others, and where it has fields, copies of it with one field replaced."""
    yield from FOREIGN
    valid = VALID[parameter]
    if isinstance(valid, HandRequest | StepOutput | WorkerOutput):
        for field in dataclasses.fields(valid):
            for value in FOREIGN:
                changed = copy.copy(valid)
                object.__setattr__(changed, field.name, value)
                yield changed


class Opened:
    """A stack in service with the chunks of a prompt, and a request that is alive."""

    def __init__(self, owner: str) -> None:
        self._ends = ExitStack()
        if owner == "staged stack":
            self.stack: Any = self._ends.enter_context(tierkv.open_staged_stack(STACK, engine_spec()))
            self.stack.on_new_request(LIVE)
        else:
            self.stack = self._ends.enter_context(tierkv.open_stack(STACK, engine_spec()))
            self._engine = HandEngine(self.stack)
            self._engine.store(PROMPT)
            self.stack.on_new_request(HandRequest(LIVE, PROMPT))

    def check(self) -> None:
        """Check that it serves."""
        if isinstance(self.stack, StagedStack):
            assert self.stack.lookup(LIVE, KEY, 16) is LookupResult.MISS
            self.stack.end_step()
        else:
            assert self._engine.load(PROMPT) == PROMPT.chunks

    def close(self) -> None:
        """Close it."""
        self._ends.close()


@pytest.mark.parametrize(("owner", "name", "parameter"), [(owner, *one) for owner in OWNERS for one in calls_of(owner)])
def test_a_foreign_value_is_taken_or_refused_by_name(owner: str, name: str, parameter: str) -> None:
    """An error from inside says nothing about the call, and may leave a half of it done."""
    opened, unnamed = Opened(owner), []
    for value in foreign_values(parameter):
        method = getattr(OWNERS[owner][1](opened.stack), name)
        parameters = inspect.signature(method).parameters
        given = {key: VALID[key] for key, one in parameters.items() if one.default is one.empty}
        try:
            method(**{**given, parameter: value})
        except TierKVError:
            opened.check()
        except Exception as error:  # noqa: BLE001 - which ones there are is the question
            unnamed.append(f"{value!r:.200} raised {error!r}")
        else:
            opened.close()
            opened = Opened(owner)
    opened.close()
    assert unnamed == []


def test_every_object_is_tried() -> None:
    """A list of no calls would pass."""
    assert all(any(calls_of(owner)) for owner in ("stack", "staged stack", "worker", "tiers"))
