"""Device and attention backend, as part of the namespace: the bytes of a page depend on both."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.version import __version__


def named_backends(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's, which has no types here
    """Attention backends that the user named, for all layers or for kinds of them; empty if vLLM chooses all."""
    attention = getattr(vllm_config, "attention_config", None)
    backend, kinds = getattr(attention, "backend", None), getattr(attention, "backend_per_kind", None) or {}
    words = [_name_of(backend)] if backend else []
    return ",".join([*words, *(f"{kind}:{_name_of(kinds[kind])}" for kind in sorted(kinds))])


def _name_of(backend: object) -> str:
    return str(getattr(backend, "name", backend))


def device_words(named: str = "") -> str:
    """Describe device and attention backend in two words of a layout.

    Each attention backend arranges a page for its kernels. The name of a configured backend determines the arrangement.
    A backend chosen by vLLM depends on vLLM's version and on the device's capabilities, so the text has both. On CPUs
    the text always has the capabilities, because vLLM's CPU kernels arrange keys by them with any backend.

    Args:
        named: result of :func:`named_backends`; empty where it is unknown.
    """
    kind = str(current_platform.device_type)
    if kind == "cpu":
        kind = _cpu()
    elif not named:
        capability = current_platform.get_device_capability()
        if capability is not None:
            kind = f"{kind}-{capability.as_version_str()}"
    chosen = named or "auto-" + ".".join(__version__.split(".")[:2])
    return f"device={kind} attention={chosen}"


def _cpu() -> str:
    import torch  # noqa: PLC0415 - only needed on CPUs

    flags = {"amx": "_is_amx_tile_supported", "avx512": "_is_avx512_supported"}
    able = [name for name, flag in flags.items() if getattr(torch.cpu, flag, bool)()]
    return "-".join(["cpu", current_platform.get_cpu_architecture().name.lower(), *able])
