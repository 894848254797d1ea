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
loads that wait for steps in flight                  only with groups in host memory (HiSparse), which are refused
the tail of a hit computed again (replay)            only with ``prefix_replay_tokens``, which are refused
statistics carry ``info``                            vLLM's own class adds it; the connector has none
gauges of ``OffloadingSpec`` are "most recent"       by vLLM's default; with the connector by ours, in both versions
===================================================  ==================================================================
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from tierkv.errors import EngineVersionError
from tierkv.integrations.vllm.signatures import misfits, missing_names

_log = logging.getLogger(__name__)

SUPPORTED = ("0.32", "0.33")
"""Minor versions whose interfaces the adapters support. Tests run in 0.32."""


def check_installed() -> None:
    """Check that this process can import vLLM, in any version.

    Raises:
        EngineVersionError: vLLM is missing.
    """
    installed_version()


def installed_version() -> str:
    """Version of the vLLM that this process would import.

    Raises:
        EngineVersionError: vLLM is missing.
    """
    try:
        from vllm.version import __version__ as version  # noqa: PLC0415 - the package must import without vLLM
    except ImportError as error:
        raise EngineVersionError(
            f"vLLM cannot be imported here ({error}); install a version that tierkv supports: {_names()}"
        ) from error
    return str(version)


def is_supported(version: str) -> bool:
    """Whether a version of vLLM, such as ``0.32.0+cpu``, is in :data:`SUPPORTED`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and f"{found[1]}.{found[2]}" in SUPPORTED


def load_checked(version: str, load: Callable[[], object]) -> object:
    """Load a class of an adapter. In an unknown version, check by inspection that vLLM's interfaces fit, and warn.

    Args:
        version: the installed vLLM.
        load: imports the class.

    Raises:
        EngineVersionError: the version is unknown, and something that the adapter calls or overrides has another
            signature, or is missing. The message lists it.
    """
    if is_supported(version):
        return load()
    found: object = None
    try:
        found = load()
        problems = [*missing_names(), *misfits()]
    except (ImportError, AttributeError) as error:
        problems = [str(error)]
    if problems:
        raise EngineVersionError(
            f"vLLM {version} is not supported by this version of tierkv, which supports {_names()}: install one of "
            "these, or a version of tierkv that supports yours. These parts of its interfaces do not fit:\n"
            + "\n".join(f"- {problem}" for problem in problems)
        )
    _log.warning(
        "vLLM %s is unknown to this version of tierkv, which was tested with %s. The signatures of its interfaces fit, "
        "so it is used. Set tierkv_strict to true in kv_connector_extra_config to refuse it",
        version,
        _names(),
    )
    return found


def check_strict(strict: bool, version: str | None = None) -> None:  # noqa: FBT001 - the value of an option
    """Check the version where ``tierkv_strict`` is set.

    Args:
        strict: whether unknown versions are refused.
        version: a version of vLLM; None: the installed one.

    Raises:
        EngineVersionError: the version is not in :data:`SUPPORTED`. The message lists those.
    """
    version = installed_version() if strict and version is None else version
    if strict and version is not None and not is_supported(version):
        raise EngineVersionError(
            f"tierkv_strict = true: vLLM {version} is not supported by this version of tierkv, which supports "
            f"{_names()}: install one of these, or remove tierkv_strict"
        )


def _names() -> str:
    return " and ".join(f"{minor}.x" for minor in SUPPORTED)
