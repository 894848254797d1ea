"""tierkv inside vLLM, by either of its two seams. Importing this package loads neither vLLM nor torch.

``TierKVConnector`` (``kv_connector="TierKVConnector"``, ``kv_connector_module_path="tierkv.integrations.vllm"``) runs
tierkv's own scheduler; ``TierKVSpec`` (``kv_connector="OffloadingConnector"``, ``spec_name`` and
``spec_module_path`` in the extra configuration) runs its manager and worker under vLLM's. Both take the stack from
``kv_connector_extra_config["tierkv"]``: the path of its description, or the description itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.integrations.first_use import load

if TYPE_CHECKING:
    from tierkv.integrations.vllm.connector import TierKVConnector as TierKVConnector
    from tierkv.integrations.vllm.spec import TierKVSpec as TierKVSpec

__all__ = ["TierKVConnector", "TierKVSpec"]

_HOMES = {"TierKVConnector": "connector", "TierKVSpec": "spec"}


def __getattr__(name: str) -> object:
    """See :func:`tierkv.integrations.first_use.load`."""
    return load(__name__, _HOMES, name)
