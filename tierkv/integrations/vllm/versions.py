"""Which versions of vLLM are served. Its interfaces for connectors change between minor versions.

What 0.33 changes of all that the adapters touch, and what they do about it. 0.32 calls none of the new methods.

===================================================  ==================================================================
0.33                                                 here
===================================================  ==================================================================
``OffloadingWorker.submit_load(expedited=)``         accepted; every copy begins at once, so none has to overtake
``sync_load_budget_bytes``: loads within a step      ``wait`` ends them, as it does for flushed stores
``OffloadingManager.lock``                           the base class's no-op: all calls come from the scheduler's thread
``OffloadingManager.on_reset_flushed``               all that was in flight at a reset has ended
``config_info``, ``OffloadingSpec.config_info_keys``  the labels of ``vllm:kv_offload_config_info``
``on_schedule_end``: last call of a step             in 0.32 before the step's stores; either will do
``OffloadingGroupConfig`` tells windows in chunks    of vLLM's size; turned into chunks of ours (0.32 computes them)
``KVConnectorBase_V1.unregister_kv_caches``          sleep mode: waits for all copies; addresses stay the same
results told before ``wait_for_save``                stores begin with the next step in either order
hits capped by an auxiliary output connector         fewer tokens taken than answered, as after a preemption
hashes that look ahead (``lookahead_token_ids``)     never with a KV connector, says vLLM's configuration
``OffloadingEvent.metadata_only``                    not used: what is announced was stored
statistics carry ``info``                            vLLM's own class adds it; with the connector there is none
gauges of ``OffloadingSpec`` are "most recent"       by vLLM's default; with the connector by ours, in both versions
===================================================  ==================================================================
"""

from __future__ import annotations

import re

from tierkv.errors import EngineVersionError

SUPPORTED = ("0.32", "0.33")
"""Minor versions whose interfaces the adapters were written for; 0.32 is the one that is tested in the engine."""


def check_installed() -> None:
    """Look at the vLLM that this process would import.

    Raises:
        EngineVersionError: there is none, or it is not one of :data:`SUPPORTED`.
    """
    try:
        from vllm.version import __version__ as version  # noqa: PLC0415 - the package must import without vLLM
    except ImportError as error:
        raise EngineVersionError(
            f"vLLM cannot be imported here ({error}); install one of the versions that tierkv serves: {_names()}"
        ) from error
    check_version(version)


def check_version(version: str) -> None:
    """Look at a version as vLLM tells it, such as ``0.32.0+cpu``.

    Raises:
        EngineVersionError: it is not one of :data:`SUPPORTED`; names them.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or f"{found[1]}.{found[2]}" not in SUPPORTED:
        raise EngineVersionError(
            f"vLLM {version} is not served by this version of tierkv; it serves {_names()}: install one of these, or a "
            "version of tierkv that serves yours"
        )


def _names() -> str:
    return " and ".join(f"{minor}.x" for minor in SUPPORTED)
