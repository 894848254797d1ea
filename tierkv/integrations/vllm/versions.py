"""Supported versions of vLLM. Its connector interfaces change between minor versions.

The table lists the changes of 0.33 that affect the adapters. 0.32 calls none of the new methods.

===================================================  ==================================================================
0.33                                                 here
===================================================  ==================================================================
``OffloadingWorker.submit_load(expedited=)``         accepted; every copy begins at once, so no order is needed
``sync_load_budget_bytes``: loads within a step      ``wait`` ends them, as it does for flushed stores
``OffloadingManager.lock``                           the base class's no-op: all calls come from the scheduler's thread
``OffloadingManager.on_reset_flushed``               all that was in flight at a reset has ended
``config_info``, ``OffloadingSpec.config_info_keys``  the labels of ``vllm:kv_offload_config_info``
``on_schedule_end``: last call of a step             in 0.32 before the step's stores; both orders work
``OffloadingGroupConfig`` has windows in chunks      of vLLM's size; converted to ours (0.32 computes them)
``KVConnectorBase_V1.unregister_kv_caches``          sleep mode: waits for all copies; addresses stay the same
results reported before ``wait_for_save``            stores begin with the next step in either order
hits capped by an auxiliary output connector         fewer tokens taken than answered, as after a preemption
hashes that look ahead (``lookahead_token_ids``)     excluded with a KV connector by vLLM's configuration
``OffloadingEvent.metadata_only``                    not used: every announced chunk was stored
statistics carry ``info``                            vLLM's own class adds it; the connector has none
gauges of ``OffloadingSpec`` are "most recent"       by vLLM's default; with the connector by ours, in both versions
===================================================  ==================================================================
"""

from __future__ import annotations

import re

from tierkv.errors import EngineVersionError

SUPPORTED = ("0.32", "0.33")
"""Minor versions whose interfaces the adapters support. Tests run in 0.32."""


def check_installed() -> None:
    """Check the vLLM that this process would import.

    Raises:
        EngineVersionError: vLLM is missing, or its version is not in :data:`SUPPORTED`.
    """
    try:
        from vllm.version import __version__ as version  # noqa: PLC0415 - the package must import without vLLM
    except ImportError as error:
        raise EngineVersionError(
            f"vLLM cannot be imported here ({error}); install a version that tierkv supports: {_names()}"
        ) from error
    check_version(version)


def check_version(version: str) -> None:
    """Check a version of vLLM, such as ``0.32.0+cpu``.

    Raises:
        EngineVersionError: the version is not in :data:`SUPPORTED`. The message lists those.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or f"{found[1]}.{found[2]}" not in SUPPORTED:
        raise EngineVersionError(
            f"vLLM {version} is not supported by this version of tierkv, which supports {_names()}: install one of "
            f"these, "
            "or a version of tierkv that supports yours"
        )


def _names() -> str:
    return " and ".join(f"{minor}.x" for minor in SUPPORTED)
