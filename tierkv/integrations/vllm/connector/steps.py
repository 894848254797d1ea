"""Translation of vLLM's scheduler output into tierkv's step. Plain attribute access; does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tierkv.types.engine import ScheduledRequest, StepOutput

BlockIds = tuple[tuple[int, ...], ...]


def step_output(
    output: Any,  # noqa: ANN401 - vLLM's SchedulerOutput, which has no types here
    num_groups: int,
    in_flight_tokens: Callable[[str], int],
) -> StepOutput:
    """Translate vLLM's ``SchedulerOutput`` into a :class:`StepOutput`.

    Args:
        output: output of the step that is being scheduled.
        num_groups: number of KV cache groups.
        in_flight_tokens: returns the number of a request's computed tokens that belong to steps still in flight.
    """
    return StepOutput(
        scheduled=tuple(_scheduled(output, num_groups, in_flight_tokens)),
        preempted=frozenset(output.preempted_req_ids or ()),
        finished=frozenset(output.finished_req_ids),
    )


def _scheduled(
    output: Any,  # noqa: ANN401 - (the same)
    num_groups: int,
    in_flight_tokens: Callable[[str], int],
) -> Iterator[ScheduledRequest]:
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id,
            new.num_computed_tokens,
            counts[new.req_id],
            _ids(new.block_ids),
            replaces_table=True,
            num_placeholder_tokens=in_flight_tokens(new.req_id),
        )
    cached = output.scheduled_cached_reqs
    nothing: BlockIds = ((),) * num_groups
    for request_id, computed, ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        yield ScheduledRequest(
            request_id,
            computed,
            counts[request_id],
            nothing if ids is None else _ids(ids),
            replaces_table=request_id in cached.resumed_req_ids,
            num_placeholder_tokens=in_flight_tokens(request_id),
        )


def _ids(groups: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(map(tuple, groups))
