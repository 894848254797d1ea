"""tierkv inside vLLM, by either of its two seams. Importing this package loads neither vLLM nor torch.

``TierKVConnector`` (``kv_connector="TierKVConnector"``, ``kv_connector_module_path="tierkv.integrations.vllm"``) runs
tierkv's own scheduler; ``TierKVSpec`` (``kv_connector="OffloadingConnector"``, ``spec_name`` and
``spec_module_path`` in the extra configuration) runs its manager and worker under vLLM's. Both take the stack from
``kv_connector_extra_config["tierkv"]``: the path of its description, or the description itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.integrations.vllm.connector import TierKVConnector as TierKVConnector
    from tierkv.integrations.vllm.spec import TierKVSpec as TierKVSpec

__all__ = ["TierKVConnector", "TierKVSpec"]

_HOMES = {
    "TierKVConnector": "tierkv.integrations.vllm.connector",
    "TierKVSpec": "tierkv.integrations.vllm.spec",
}


def __getattr__(name: str) -> object:
    """Load what vLLM asks for, after a look at its version (PEP 562).

    Raises:
        AttributeError: there is no such name.
        EngineVersionError: this version of vLLM is not served.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    import importlib  # noqa: PLC0415 - only when something is used

    from tierkv.integrations.vllm.versions import check_installed  # noqa: PLC0415 - (the same)

    check_installed()
    found: object = getattr(importlib.import_module(_HOMES[name]), name)
    return found
