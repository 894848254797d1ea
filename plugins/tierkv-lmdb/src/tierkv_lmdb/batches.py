"""Division of the requests of one call into transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Request = TypeVar("_Request")


def batches(
    requests: Sequence[_Request], length: Callable[[_Request], int], bytes_max: int
) -> Iterator[Sequence[_Request]]:
    """Cut requests, in order, into batches of up to ``bytes_max`` in total, or of one longer request."""
    start, total = 0, 0
    for number, request in enumerate(requests):
        size = length(request)
        if number > start and total + size > bytes_max:
            yield requests[start:number]
            start, total = number, 0
        total += size
    if start < len(requests):
        yield requests[start:]
