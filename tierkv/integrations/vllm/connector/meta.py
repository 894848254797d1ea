"""What travels between the two sides of the connector with each step, as vLLM wants it wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tierkv.stack.remote_worker import WorkerSetup
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.worker import Worker


@dataclass(frozen=True)
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """Scheduler to workers.

    meta: the step's transfers. setup: what a worker needs to begin (of rank 0; each puts in its own), until all have
    begun. voided: requests whose load, told as ended before, is to be told again as failed. last_steps: leads what is
    left to its end, for a worker in the scheduler's own process; it stays behind when this is sent to another.
    """

    meta: ConnectorMeta
    setup: WorkerSetup | None = None
    voided: frozenset[str] = frozenset()
    last_steps: Callable[[Worker], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the way back, which is no message."""
        return {**self.__dict__, "last_steps": None}


@dataclass(frozen=True)
class WorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]  # (the same)
    """Workers to scheduler. output: what they ended. begun: how many workers have their setup, told once each."""

    output: WorkerOutput
    begun: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMeta:
        """Both as one; neither is changed."""
        if not isinstance(other, WorkerMeta):
            return self
        return replace(self, output=WorkerOutput.aggregate([self.output, other.output]), begun=self.begun + other.begun)
