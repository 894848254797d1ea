"""Identity of weights, and of the settings of vLLM that change the KV of equal tokens. Does not import vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.integrations.vllm.identity.files import digest_of, folder_digest, read_family, reads_params
from tierkv.integrations.vllm.identity.hub import commit_of, fetched_commit

_MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
)
"""Settings of vLLM's ``MultiModalConfig`` that change what the model gets of a picture, a video or a sound."""

_FOLDER_FORMATS = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "instanttensor", "runai_streamer",
}  # fmt: skip
"""Values of ``--load-format`` with which vLLM reads the weights of the model's folder."""

_PARTS = ("audio_model_id", "text_model_id")
"""Fields of a model's configuration that name other models, from which vLLM reads a part of the weights (Ultravox)."""

_MEASURED = {"cohere_compass_text", "minimax_m2", "plamo3"}
"""Types of models for which vLLM takes the largest position from ``max_model_len``."""

_ENVIRONMENT = (
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
)
"""Variables of vLLM that no field of its configuration shows. They choose the quantization of weights or of values
between layers, experts at random (for benchmarks), or the arrangement of a page."""

_PLACES = {"_name_or_path", "transformers_version"}
"""Values of a model's configuration that do not describe the model."""


def weights_identity(model_config: Any) -> str:  # noqa: ANN401 - vLLM's, which has no types here
    """Text that differs for other weights: a digest of the files of a folder, or the commit of a model from the hub.

    Empty where neither is known. Then ``namespace.epoch`` of the stack must tell other weights apart.
    """
    return folder_digest(str(model_config.model)) or commit_of(getattr(model_config, "revision", None))


def revision_of(model_config: Any) -> str:  # noqa: ANN401 - (the same)
    """Identity of the weights of a model; where it is not known, the revision as the user named it."""
    return weights_identity(model_config) or str(model_config.revision or "")


def weights_words(vllm_config: Any) -> dict[str, str]:  # noqa: ANN401 - (the same)
    """Facts beside the revision that change the KV of equal tokens in pages of one shape, by name.

    These are the number format of the weights, weights that are not those of the folder, or some of several in it,
    the place of weights outside it, other models that are a part of this one, a configuration of another format or
    from another folder, overrides of it, other code or another revision of it, the model of the transformers library
    or of a plugin, variables of the environment, layers whose KV keeps its number format, the preparation of pictures
    and other media, the modules that adapters may change, the context length where the model computes otherwise for a
    long one, and the draft whose KV is stored beside that of the model. Settings that are not used add no word.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    words = {"weights": f"{str(model.dtype).removeprefix('torch.')}/{model.quantization or 'none'}"}
    words |= {name: digest_of(value) for name, value in _settings(vllm_config).items() if value}
    if load := _other_weights(getattr(vllm_config, "load_config", None), str(getattr(model, "model", ""))):
        words["load"] = load
    # Such as an object store: the folder has the configuration alone then.
    if place := getattr(model, "model_weights", ""):
        words["place"] = folder_digest(place) or digest_of(place)
    if uses_transformers(model):
        words["model"] = "transformers"
    if context := _context(model):
        words["context"] = context
    if speculative is not None and speculative.uses_draft_kv_cache():
        draft = speculative.draft_model_config
        words["draft"] = digest_of(revision_of(draft) or str(draft.model))
    return words


def _settings(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401 - (the same)
    """Settings that count by their value, by the name of their word; those that are empty do not count."""
    model = vllm_config.model_config
    place = getattr(model, "hf_config_path", None)
    config = getattr(model, "multimodal_config", None)
    media = {name: value for name in _MEDIA if (value := getattr(config, name, None))}
    if "video_pruning_rate" in media:
        media["video_pruning_method"] = getattr(config, "video_pruning_method", None)
    return {
        "quantization": getattr(model, "quantization_config", None),
        "config": _config_identity(model, place) if place else None,
        "format": _config_format(model),
        "parts": _parts(getattr(model, "hf_config", None)),
        "code": getattr(model, "code_revision", None),
        "overrides": _overrides(model),
        "classes": getattr(model, "model_class_overrides", None),
        "plugin": _plugin_class(model),
        "environment": {name: value for name in _ENVIRONMENT if (value := os.environ.get(name))},
        "skips": getattr(getattr(vllm_config, "cache_config", None), "kv_cache_dtype_skip_layers", None),
        "media": media,
        "tokenizer": _preparing_tokenizer(model) if config is not None else None,
        "adapters": _adapter_settings(getattr(vllm_config, "lora_config", None), model.dtype),
    }


def _config_identity(model: Any, place: str) -> str:  # noqa: ANN401 - (the same)
    """Identity of a configuration from another place than the weights."""
    return folder_digest(place) or commit_of(getattr(model, "_hf_config_revision", None)) or place


def _overrides(model: Any) -> Any:  # noqa: ANN401 - (the same)
    """Overrides of the configuration; where these are a function, whose name says little, the configuration itself."""
    if not callable(model.hf_overrides):
        return model.hf_overrides
    found = model.hf_config.to_dict()
    return {name: value for name, value in found.items() if name not in _PLACES}


def _plugin_class(model: Any) -> str:  # noqa: ANN401 - (the same)
    """Class that a plugin of vLLM has registered for the architecture; empty where it is one of vLLM's own."""
    registered = getattr(getattr(model, "registry", None), "models", {}).get(getattr(model, "architecture", None))
    if (kind := getattr(registered, "model_cls", None)) is not None:
        module, name = kind.__module__, kind.__qualname__
    else:  # it is imported later, or there is none
        module, name = (getattr(registered, field, "vllm.") for field in ("module_name", "class_name"))
    return "" if module.startswith("vllm.") else f"{module}:{name}"


def _config_format(model: Any) -> str:  # noqa: ANN401 - (the same)
    """Format of the configuration, where it is not the usual one; empty where it is."""
    kind = str(getattr(model, "config_format", "auto"))
    if kind not in {"auto", "hf", "mistral"}:
        return kind
    return "mistral" if reads_params(str(getattr(model, "model", "")), kind) else ""


def _preparing_tokenizer(model: Any) -> str:  # noqa: ANN401 - (the same)
    """Identity of a tokenizer from another place than the weights, if it also prepares pictures and sounds.

    That of Mistral's format does (Pixtral, Voxtral): its file has the size of a picture and the rate of a sound.
    """
    place = str(getattr(model, "tokenizer", None) or "")
    if place in {"", str(model.model)}:
        return ""
    if (file := Path(place) / "tekken.json").is_file():
        return folder_digest(str(file))
    return place if getattr(model, "tokenizer_mode", None) == "mistral" else ""


def _parts(config: Any) -> dict[str, str]:  # noqa: ANN401 - (the same)
    """Other models that are a part of the model: a digest of the folder of each, or its name and commit on the hub."""
    found = {}
    for name in _PARTS:
        if place := getattr(config, name, None):
            found[name] = folder_digest(str(place)) or f"{place} {fetched_commit(str(place))}"
    return found


def _adapter_settings(lora: Any, dtype: object) -> dict[str, Any]:  # noqa: ANN401 - (the same)
    """Settings with which an adapter of the same files has other KV."""
    if lora is None:
        return {}
    found = {
        "modules": sorted(lora.target_modules or ()),
        "tower": bool(getattr(lora, "enable_tower_connector_lora", False)),
        "dtype": "" if lora.lora_dtype in {"auto", dtype} else str(lora.lora_dtype).removeprefix("torch."),
    }
    return {name: value for name, value in found.items() if value}


def _other_weights(load_config: Any, place: str) -> str:  # noqa: ANN401 - (the same)
    """Name of the loader where the weights are not those of the model's folder, or only some of several there."""
    kind = str(getattr(load_config, "load_format", "auto"))
    if kind in _FOLDER_FORMATS:
        return read_family(place, kind)
    extra = getattr(load_config, "model_loader_extra_config", None)
    return f"{kind}/{digest_of(extra)}" if extra else kind


def _context(model: Any) -> str:  # noqa: ANN401 - (the same)
    """Word for how a model computes with this ``max_model_len``; empty where it does not look at that.

    vLLM turns keys by angles that depend on the largest position, and takes that from ``max_model_len`` for some
    models. For all others it is a part of their configuration.
    """
    config = getattr(model, "hf_text_config", None)
    limit = _context_limit(config)
    words = ["long" if _computes_as_for_long(model, limit) else "short"] if limit else []
    if getattr(config, "model_type", None) in _MEASURED and any(map(_looks_at_largest_position, ropes_of(config))):
        words.append(str(model.max_model_len))
    return "/".join(words)


def _context_limit(config: Any) -> int:  # noqa: ANN401 - (the same)
    """Largest ``max_model_len`` for which the model computes as for short prompts; 0: there is none.

    vLLM turns the keys of a model with LongRoPE by other factors where prompts may be longer than in its first
    training, and scales queries of Llama 4 in later layers by the position.
    """
    if _is_llama4(config):
        return 32768
    limits = (one.get("original_max_position_embeddings", 0) for one in ropes_of(config) if _is_longrope(one))
    return max(map(int, limits), default=0)


def uses_transformers(model: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether vLLM runs the model of the transformers library in place of its own."""
    ask = getattr(model, "using_transformers_backend", None)
    return ask is not None and bool(ask())


def ropes_of(config: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401 - (the same)
    """Parameters of rotary embeddings: those of all layers, or those of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    return [one for one in by_layer if isinstance(one, Mapping)]


def _is_longrope(rope: Mapping[str, Any]) -> bool:
    return rope.get("rope_type") == "longrope"


def _looks_at_largest_position(rope: Mapping[str, Any]) -> bool:
    """Whether the angles depend on the largest position. Dynamic NTK compares it with that of the training."""
    is_dynamic = rope.get("rope_type") == "dynamic" and "max_trained_positions" in rope
    return is_dynamic or _is_longrope(rope)


def _computes_as_for_long(model: Any, limit: int) -> bool:  # noqa: ANN401 - (the same)
    """Whether prompts may be longer than ``limit``, or the configuration of generation decides as if they were."""
    if _is_llama4(model.hf_text_config):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        return bool(generation.get("attn_temperature_tuning", model.max_model_len > limit))
    return bool(model.max_model_len > limit)


def _is_llama4(config: Any) -> bool:  # noqa: ANN401 - (the same)
    return str(getattr(config, "model_type", "")).startswith("llama4")
