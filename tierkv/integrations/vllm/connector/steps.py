"""Translation of vLLM's scheduler output into tierkv's step. Plain attribute access; does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tierkv.types.engine import ScheduledRequest, StepOutput

BlockIds = tuple[tuple[int, ...], ...]

_EMPTY_STEP = StepOutput()


def step_output(
    output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput, which has no types here
    num_groups: int,
    in_flight_tokens: Callable[[str], int],
    advance: Callable[[str, int, int], bool],
) -> StepOutput:
    """Translate vLLM's ``SchedulerOutput`` into a :class:`StepOutput`.

    Args:
        output: output of the step that is being scheduled.
        num_groups: number of KV cache groups.
        in_flight_tokens: returns the number of a request's computed tokens that belong to steps still in flight.
        advance: ``advance`` of the stack, for requests that got no block.
    """
    counts = output.num_scheduled_tokens
    scheduled = [
        ScheduledRequest(
            new.req_id,
            new.num_computed_tokens,
            counts[new.req_id],
            _ids(new.block_ids),
            replaces_table=True,
            num_placeholder_tokens=in_flight_tokens(new.req_id),
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for request_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        count = counts[request_id]
        if ids is None and request_id not in resumed and advance(request_id, computed, count):
            continue
        scheduled.append(
            ScheduledRequest(
                request_id,
                computed,
                count,
                ((),) * num_groups if ids is None else _ids(ids),
                replaces_table=request_id in resumed,
                num_placeholder_tokens=in_flight_tokens(request_id),
            )
        )
    if not (scheduled or output.preempted_req_ids or output.finished_req_ids):
        return _EMPTY_STEP
    return StepOutput(tuple(scheduled), frozenset(output.preempted_req_ids or ()), frozenset(output.finished_req_ids))


def _is_block(block_id: object) -> bool:
    return isinstance(block_id, int) and block_id >= 0


def _ids(groups: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(map(tuple, groups))


def blocks_only(
    scheduled: Sequence[ScheduledRequest], request_id: str, num_groups: int
) -> tuple[ScheduledRequest, ...]:
    """Entries of a step, those of one request replaced by one that only says which blocks are written."""
    ids: list[list[int]] = [[] for _ in range(num_groups)]
    others = []
    for entry in scheduled:
        if entry.request_id != request_id:
            others.append(entry)
            continue
        for group, table in zip(ids, entry.block_ids, strict=False):  # the numbers of groups may differ
            group.extend(filter(_is_block, table))
    return (*others, ScheduledRequest(request_id, 0, 0, _ids(ids), replaces_table=True))
