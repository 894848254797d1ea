"""A real model in vLLM with tierkv, by both seams (``--model FOLDER``): computed, loaded from memory, loaded from disk.

Time to the first token, text by text: of a prompt that is new, of the same one when the device has forgotten it, and of
the same one in the next process, when only the disk knows it. Answers are compared with those computed, and with those
that vLLM gives without tierkv after a hit in its own prefix cache: that is the same arithmetic, so they must be equal.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Settings
from benchmarks.models.first_tokens import Processes, row
from benchmarks.rows import Row

SEAMS = ("TierKVConnector", "TierKVSpec")
_MODULE = "tierkv.integrations.vllm"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM's hashes of blocks begin with it: without it no process knows another's
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(settings: Settings) -> Iterator[Row]:
    """Measure without tierkv, then by each seam: a process that starts empty, and the next one."""
    if settings.model is None:
        _say("no model was given (--model FOLDER), so nothing is measured")
        return
    if importlib.util.find_spec("vllm") is None:
        _say("vLLM is not installed here, so nothing is measured")
        return
    engines = Processes("benchmarks.models.model_engine", settings.model, settings, _ENVIRONMENT)
    _say("vLLM alone")
    alone = engines.run(transfer=None, passes=[("computed", True), ("hit", False)])
    for seam in SEAMS:
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="model-vllm-") as place:
            transfer = transfer_config(seam, Path(place))
            _say(f"{seam}: a process that begins with nothing")
            first = engines.run(transfer=transfer, passes=[("computed", True), ("memory", True)])
            _say(f"{seam}: the next process")
            second = engines.run(transfer=transfer, passes=[("disk", True)])
        computed = first["computed"]
        same = {"those computed": computed, "those after a hit of vLLM's own": alone["hit"]}
        bare = {"those of vLLM alone": alone["computed"]}
        yield row(f"computed: {seam}", computed, "vLLM alone", alone["computed"], bare)
        yield row(f"from memory: {seam}", first["memory"], "computed", computed, same)
        yield row(f"from disk, after a restart: {seam}", second["disk"], "computed", computed, same)
    yield row(
        "vLLM's own prefix cache", alone["hit"], "computed", alone["computed"], {"those computed": alone["computed"]}
    )


def transfer_config(seam: str, place: Path) -> dict[str, Any]:
    """Argument of ``--kv-transfer-config``: 256 MiB of memory, and a folder below it."""
    disk = {"backend": "disk", "path": str(place), "capacity": "1GiB", "min_free_bytes": 0}
    stack = {"host": {"capacity": "256MiB"}, "chunk": {"blocks": 2}, "tiers": [disk]}
    if seam == "TierKVConnector":
        return {
            "kv_connector": seam,
            "kv_connector_module_path": _MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tierkv": stack},
        }
    extra = {"spec_name": seam, "spec_module_path": _MODULE, "tierkv": stack}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _say(what: str) -> None:
    sys.stderr.write(f"model_vllm: {what}\n")
    sys.stderr.flush()
