"""Adapters to vLLM, one for each of its two interfaces. Importing this package loads neither vLLM nor torch.

- ``TierKVConnector`` (:mod:`~tierkv.integrations.vllm.connector`) runs tierkv's own scheduler. Select it with
  ``kv_connector="TierKVConnector"`` and ``kv_connector_module_path="tierkv.integrations.vllm"``.
- ``TierKVSpec`` (:mod:`~tierkv.integrations.vllm.spec`) runs tierkv's manager and worker under vLLM's scheduler. Select
  it with ``kv_connector="OffloadingConnector"``, and ``spec_name`` and ``spec_module_path`` in the extra configuration.

Both read the stack from ``kv_connector_extra_config["tierkv"]``: the path of a description, or the description itself
(:mod:`~tierkv.integrations.vllm.options`).

Common parts: supported versions (:mod:`~tierkv.integrations.vllm.versions`), the location of KV pages in vLLM's memory
(:mod:`~tierkv.integrations.vllm.pages`), state layers (:mod:`~tierkv.integrations.vllm.states`), the device part of the
namespace (:mod:`~tierkv.integrations.vllm.device`), metrics and KV events.

Flow: vLLM creates one object for its scheduler and one per worker. The scheduler's object opens the stack. Each step,
it sends instructions to the workers, which copy between vLLM's KV memory and the shared host tier and report back.

Invariants:

- Both sides derive the same shape from their own copy of vLLM's configuration.
- Every setting that changes the meaning of KV bytes is part of the namespace.
- vLLM never waits for a load without getting a result: a load that cannot start is reported as failed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tierkv.integrations.first_use import load
from tierkv.integrations.vllm.versions import installed_version, load_checked

if TYPE_CHECKING:
    from tierkv.integrations.vllm.connector.connector import TierKVConnector as TierKVConnector
    from tierkv.integrations.vllm.spec.spec import TierKVSpec as TierKVSpec

__all__ = ["TierKVConnector", "TierKVSpec"]

_MODULES = {"TierKVConnector": "connector.connector", "TierKVSpec": "spec.spec"}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name == "OffloadingConnector":
        raise AttributeError(
            "OffloadingConnector is vLLM's: for TierKVSpec, remove kv_connector_module_path; for TierKVConnector, "
            "remove --kv-offloading-size, with which vLLM puts its own connector in the place of the one that is named"
        )
    if name not in _MODULES:
        return load(__name__, _MODULES, name)  # which names those that exist
    found = load_checked(installed_version(), partial(load, __name__, _MODULES, name))
    globals()[name] = found  # checked, and warned of, once
    return found
