"""Sizes and durations of transfers between GPU and host, one entry per operation.

Workers may be other processes, so they send plain dicts and lists. Aggregation copies every list it takes over (D9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

LOAD = "CPU_to_GPU"
STORE = "GPU_to_CPU"

SIZE = "op_size"
"""Bytes of an operation."""
TIME = "op_time"
"""Seconds it took."""

Operations = Mapping[str, Sequence[Mapping[str, float]]]
"""Transfer type ("SRC_to_DST") -> operations, each with :data:`SIZE` and :data:`TIME`."""


class TransferStats:
    """Operations since they were last taken.

    Args:
        data: first operations; copied. Entries that lack a size or a time are left out (S109).
        operations_max: operations kept per type; the oldest are dropped first. None: all.
    """

    def __init__(self, data: Operations | None = None, *, operations_max: int | None = None) -> None:
        self.data: dict[str, list[dict[str, float]]] = {}
        self._operations_max = operations_max
        if data:
            self.add(data)

    def record(self, transfer_type: str, size_bytes: int | None, time_s: float | None) -> None:
        """Add one operation, unless it moved no bytes or its time is None. 0 seconds are a valid time."""
        if size_bytes and time_s is not None:
            self._keep(transfer_type, [{SIZE: size_bytes, TIME: time_s}])

    def aggregate(self, other: TransferStats) -> Self:
        """Append the operations of ``other``, which is unchanged; return this object."""
        self.add(other.data)
        return self

    def add(self, data: Operations) -> Operations:
        """Append copies of operations; return those that were appended. Others lack a size or a time (S109)."""
        added: dict[str, list[dict[str, float]]] = {}
        for transfer_type, operations in data.items():
            known = [dict(one) for one in operations if SIZE in one and TIME in one]
            whole = [one for one in known if one[SIZE] is not None and one[TIME] is not None]
            if whole:
                added[transfer_type] = whole
                self._keep(transfer_type, whole)
        return added

    def _keep(self, transfer_type: str, operations: list[dict[str, float]]) -> None:
        """Append whole operations."""
        kept = self.data.setdefault(transfer_type, [])
        kept += operations
        if self._operations_max is not None and len(kept) > self._operations_max:
            del kept[: -self._operations_max]

    def reduce(self) -> dict[str, float]:
        """Return sums for a log line: ``<type>_total_bytes`` and ``<type>_total_time`` (seconds)."""
        sums: dict[str, float] = {}
        for transfer_type, operations in self.data.items():
            sums[f"{transfer_type}_total_bytes"] = sum(one[SIZE] for one in operations)
            sums[f"{transfer_type}_total_time"] = sum(one[TIME] for one in operations)
        return sums

    @property
    def is_empty(self) -> bool:
        """Whether there are no operations."""
        return not self.data

    def drain(self) -> TransferStats | None:
        """Return all operations and begin anew; None if there are none."""
        if not self.data:
            return None
        taken = TransferStats(operations_max=self._operations_max)
        taken.data, self.data = self.data, {}
        return taken
