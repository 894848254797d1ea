"""Translation of vLLM's scheduler output."""

from __future__ import annotations

from types import SimpleNamespace

from tierkv.integrations.vllm.connector.steps import step_output
from tierkv.types.engine import ScheduledRequest, StepOutput


def output(**more: object) -> SimpleNamespace:
    """A SchedulerOutput of an empty step, with changes."""
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    fields = {
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": {},
        "preempted_req_ids": None,
        "finished_req_ids": set(),
    }
    return SimpleNamespace(**{**fields, **more})


def never(*_: object) -> bool:
    """Answer of a stack for which no request is quiet."""
    return False


def test_only_running_requests_without_blocks_are_left_out() -> None:
    """Others bring tables that the stack must know, whatever it would answer."""
    asked = []

    def always(request_id: str, computed: int, scheduled: int) -> bool:
        asked.append((request_id, computed, scheduled))
        return True

    cached = SimpleNamespace(
        req_ids=["running", "still", "resumed"],
        num_computed_tokens=[64, 65, 0],
        new_block_ids=[([5],), None, None],
        resumed_req_ids={"resumed"},
    )
    counts = {"running": 1, "still": 2, "resumed": 40}
    step = step_output(output(scheduled_cached_reqs=cached, num_scheduled_tokens=counts), 1, lambda _: 0, always)
    assert [one.request_id for one in step.scheduled] == ["running", "resumed"]
    assert asked == [("still", 65, 2)]


def test_an_empty_step() -> None:
    """Steps without requests carry transfers."""
    assert step_output(output(), 2, lambda _: 0, never) == StepOutput()


def test_new_running_and_resumed_requests() -> None:
    """New and resumed requests bring whole tables, running ones what was added, or nothing."""
    new = SimpleNamespace(req_id="new", num_computed_tokens=32, block_ids=([1, 2], [3, 4]))
    cached = SimpleNamespace(
        req_ids=["running", "still", "resumed"],
        num_computed_tokens=[64, 65, 0],
        new_block_ids=[([5], [6]), None, ([7, 8], [0, 9])],
        resumed_req_ids={"resumed"},
    )
    counts = {"new": 10, "running": 1, "still": 1, "resumed": 40}
    step = step_output(
        output(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            preempted_req_ids={"gone"},
            finished_req_ids={"done"},
        ),
        2,
        {"new": 0, "running": 1, "still": 2, "resumed": 0}.__getitem__,
        never,
    )
    assert step.scheduled == (
        ScheduledRequest("new", 32, 10, ((1, 2), (3, 4)), replaces_table=True),
        ScheduledRequest("running", 64, 1, ((5,), (6,)), num_placeholder_tokens=1),
        ScheduledRequest("still", 65, 1, ((), ()), num_placeholder_tokens=2),
        ScheduledRequest("resumed", 0, 40, ((7, 8), (0, 9)), replaces_table=True),
    )
    assert (step.preempted, step.finished) == ({"gone"}, {"done"})
