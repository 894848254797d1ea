"""Messages between the two sides of the connector, in the classes that vLLM expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup
from tierkv.types.transfers import ConnectorMeta, WorkerOutput


@dataclass(frozen=True)
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Message of one step from the scheduler to the workers."""

    meta: ConnectorMeta
    """Transfers of the step."""
    setup: WorkerSetup | None = None
    """Setup of a worker, with rank 0 in place of its own; None after all workers have started."""
    failed_loads: frozenset[str] = frozenset()
    """Requests whose load must be reported as failed."""
    stops: bool = False
    """Whether the scheduler's side has stopped after an error: workers end their loads as failed, and take no more."""
    last_steps: Callable[[ProcessWorker], None] | None = None
    """Runs the last steps with a worker in the scheduler's own process. Not sent to other processes."""

    def __getstate__(self) -> dict[str, Any]:
        """State without ``last_steps``, which cannot be sent."""
        return {**self.__dict__, "last_steps": None}


@dataclass(frozen=True)
class WorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]  # (the same)
    """Report of workers to the scheduler."""

    output: WorkerOutput
    """Jobs that the workers ended."""
    started_workers: int = 0
    """Number of workers that have their setup, reported once per worker."""
    stopped_workers: int = 0
    """Number of workers that stopped after an error, reported once per worker."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Join two reports without changing them."""
        if not isinstance(other, WorkerMeta):
            return self
        output = WorkerOutput.aggregate([self.output, other.output])
        started, stopped = (self.started_workers + other.started_workers, self.stopped_workers + other.stopped_workers)
        return replace(self, output=output, started_workers=started, stopped_workers=stopped)
