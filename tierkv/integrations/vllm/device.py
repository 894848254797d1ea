"""What the bytes of a page depend on beside its layout: the device, and who arranges a page for it."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.version import __version__


def device_words(backend: object = None) -> str:
    """Device and attention backend, as two words of a layout.

    Attention backends arrange a page as their kernels like it. A backend that the user named is enough to know how; one
    that vLLM chooses depends on vLLM's version and on what the device can do, so both are told then. What a CPU can do
    is told in any case: vLLM's kernels for CPUs arrange keys by that, whatever the backend.

    Args:
        backend: ``attention_config.backend``; None where vLLM chooses, or where it cannot be known.
    """
    named = getattr(backend, "name", None) or (str(backend) if backend else None)
    kind = str(current_platform.device_type)
    if kind == "cpu":
        kind = _cpu()
    elif named is None:
        capability = current_platform.get_device_capability()
        if capability is not None:
            kind = f"{kind}-{capability.as_version_str()}"
    chosen = named or "auto-" + ".".join(__version__.split(".")[:2])
    return f"device={kind} attention={chosen}"


def _cpu() -> str:
    import torch  # noqa: PLC0415 - only where it is asked

    flags = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported"}
    able = [name for name, flag in flags.items() if getattr(torch.cpu, flag, bool)()]
    return "-".join(["cpu", current_platform.get_cpu_architecture().name.lower(), *able])
