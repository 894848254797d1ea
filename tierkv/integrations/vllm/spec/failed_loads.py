"""Report of failed loads to vLLM, which has no place for it in the interface of offloading workers.

vLLM's ``OffloadingConnector`` asserts that each transfer succeeded. But vLLM asks every connector for the requests
whose load failed (``get_transfer_results``), and computes these. ``OffloadingConnector`` inherits a method that names
none. So a worker puts a method of its own into the one connector object that created it. No class of vLLM is changed.

Invariant: a load that failed is called a success to ``OffloadingConnector`` only in the call in which vLLM gets its
request as a failed one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.integrations.vllm.engine_checks import calling_connectors
from tierkv.logs.definitions import LOADS_FAILED
from tierkv.logs.stack_log import StackLog


def report_failed_loads(take_failed: Callable[[], set[str]]) -> bool:
    """Have the calling connector report failed loads. Call it while the connector creates its worker.

    Args:
        take_failed: returns the requests whose loads failed since the previous call. Raises nothing.

    Returns:
        Whether a connector reports them. False where no connector of vLLM is calling.
    """
    connector = next(calling_connectors(), None)
    if connector is None:
        return False
    collect, log = connector.get_transfer_results, StackLog()

    def get_transfer_results(finished_req_ids: set[str]) -> Any:  # noqa: ANN401 - vLLM's, which has no types here
        results = collect(finished_req_ids)
        failed = take_failed()
        if failed:
            log.report(LOADS_FAILED, requests=len(failed))
            results.failed_recving |= failed
        return results

    connector.get_transfer_results = get_transfer_results
    return True
