"""Identity of weights and adapters on disk: vLLM names them by path only, and another content is other KV.

A file enters with its name, its size and its content: all of it if the file is small, samples of it otherwise. Times
and folders do not enter, so copies of one model on several machines are equal.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.errors import EngineProtocolError

_log = logging.getLogger(__name__)

WHOLE_BYTES_MAX = 64 << 20
"""Largest file that is read as a whole."""
SAMPLES = 1024
"""Number of places at which a larger file is read."""
SAMPLE_BYTES = 4096

_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"}
"""Files of weights, and a model's own code."""
_CONFIGS = {
    "adapter_config.json",
    "config.json",
    "hf_quant_config.json",
    "joint_head_config.json",
    "params.json",
    "preprocessor_config.json",
    "processor_config.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
    "sparse_attention_config.json",
    "tekken.json",
    "torchao_config.json",
    "video_preprocessor_config.json",
}
"""Files of configuration. Pictures that are prepared otherwise have other KV, and vLLM hashes the raw picture only.

Of Mistral's own format, ``params.json`` has the model's configuration, and ``tekken.json`` that of pictures and sounds.
"""

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
"""Values of ``--load-format`` with which vLLM reads the weights of the model's folder, all alike."""

_Stamps = tuple[tuple[str, int, int], ...]


def weights_identity(model_config: Any) -> str:  # noqa: ANN401 - vLLM's, which has no types here
    """Text that differs for other weights: the commit of a model from the hub, or a digest of the files of a folder.

    Empty where neither is known. Then ``namespace.epoch`` of the stack must tell other weights apart. With
    ``--hf-config-path``, the known commit is that of the configuration.
    """
    commit = None if getattr(model_config, "hf_config_path", None) else _commit_of(model_config)
    return commit or folder_digest(str(model_config.model))


def _commit_of(model_config: Any) -> str | None:  # noqa: ANN401 - (the same)
    """Commit of the model's configuration on the hub; None: the configuration is in a folder."""
    commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    return str(commit) if commit else None


def revision_of(model_config: Any) -> str:  # noqa: ANN401 - (the same)
    """Revision of a model as the user named it, and the identity of its weights."""
    return " ".join(filter(None, (model_config.revision, weights_identity(model_config))))


def weights_words(vllm_config: Any) -> dict[str, str]:  # noqa: ANN401 - (the same)
    """Facts beside the revision that change the KV of equal tokens in pages of one shape, by name.

    These are the number format of the weights, weights that are not those of the folder, the place of weights outside
    it, a configuration from another folder, overrides of it, other code, layers whose KV keeps its number format, the
    preparation of pictures and other media, the modules that adapters may change, the context length where the model
    computes otherwise for a long one, and the draft whose KV is stored beside that of the model. Settings that are not
    used add no word.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    words = {"weights": f"{str(model.dtype).removeprefix('torch.')}/{model.quantization or 'none'}"}
    words |= {name: digest_of(value) for name, value in _settings(vllm_config).items() if value}
    if load := _other_weights(getattr(vllm_config, "load_config", None)):
        words["load"] = load
    # Such as an object store: the folder has the configuration alone then.
    if place := getattr(model, "model_weights", ""):
        words["place"] = folder_digest(place) or digest_of(place)
    if limit := _context_limit(getattr(model, "hf_text_config", None)):
        words["context"] = "long" if _computes_as_for_long(model, limit) else "short"
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
        "config": (_commit_of(model) or folder_digest(place) or place) if place else None,
        "overrides": model.hf_overrides,
        "classes": getattr(model, "model_class_overrides", None),
        "skips": getattr(getattr(vllm_config, "cache_config", None), "kv_cache_dtype_skip_layers", None),
        "media": media,
        "adapters": _adapter_settings(getattr(vllm_config, "lora_config", None), model.dtype),
    }


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


def _other_weights(load_config: Any) -> str:  # noqa: ANN401 - (the same)
    """Name of the loader, where the weights are not those of the model's folder; empty where they are."""
    kind = str(getattr(load_config, "load_format", "auto"))
    if kind in _FOLDER_FORMATS:
        return ""
    extra = getattr(load_config, "model_loader_extra_config", None)
    return f"{kind}/{digest_of(extra)}" if extra else kind


def _context_limit(config: Any) -> int:  # noqa: ANN401 - (the same)
    """Largest ``max_model_len`` for which the model computes as for short prompts; 0: it does not look at that.

    vLLM turns the keys of a model with LongRoPE by other factors where prompts may be longer than in its first
    training, and scales queries of Llama 4 in later layers by the position.
    """
    if _is_llama4(config):
        return 32768
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    limits = [
        int(one.get("original_max_position_embeddings", 0))
        for one in by_layer
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope"
    ]
    return max(limits, default=0)


def _computes_as_for_long(model: Any, limit: int) -> bool:  # noqa: ANN401 - (the same)
    """Whether prompts may be longer than ``limit``, or the configuration of generation decides as if they were."""
    if _is_llama4(model.hf_text_config):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        return bool(generation.get("attn_temperature_tuning", model.max_model_len > limit))
    return bool(model.max_model_len > limit)


def _is_llama4(config: Any) -> bool:  # noqa: ANN401 - (the same)
    return str(getattr(config, "model_type", "")).startswith("llama4")


def digest_of(value: object) -> str:
    """Digest of a value of a configuration. Of a function, its name."""
    text = json.dumps(value, sort_keys=True, default=lambda item: getattr(item, "__qualname__", str(item)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def folder_digest(place: str) -> str:
    """Digest of the weight files of a folder, or of one such file; empty if there are none."""
    digest = hashlib.blake2b(digest_size=16)
    files = _files_of(place) if place else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        _add_content(digest, file, size)
    return digest.hexdigest() if files else ""


def _files_of(place: str) -> list[Path]:
    root = Path(place)
    if root.is_file():
        return [root]
    if not root.is_dir():
        return []
    return sorted(file for file in root.iterdir() if file.suffix in _SUFFIXES or file.name in _CONFIGS)


def _add_content(digest: Any, file: Path, size: int) -> None:  # noqa: ANN401 - hashlib names no class for it
    with file.open("rb") as data:
        if size <= WHOLE_BYTES_MAX:
            digest.update(data.read())
            return
        for sample in range(SAMPLES):  # the first one has the names and shapes of the tensors
            data.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(data.read(SAMPLE_BYTES))


class Adapters:
    """Identities of adapters, as vLLM has loaded them. Scheduler's thread; reads the files of each adapter once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[_Stamps, str | None]] = {}
        self._first: dict[tuple[str, str], str] = {}
        """First digest by name and path, which is all that vLLM's hashes have of an adapter."""
        self._replaced: set[tuple[str, str]] = set()

    def digest_of(self, lora_request: Any) -> str | None:  # noqa: ANN401 - (the same)
        """Digest of the adapter's files; empty where it has none here. None: they have changed since vLLM loaded them.

        vLLM loads an adapter once for each number, and says nothing when it loads it again. So after a change its KV
        has an unknown meaning, unless the request itself loads the adapter (``load_inplace``).
        """
        name = int(lora_request.lora_int_id), str(getattr(lora_request, "lora_path", "") or "")
        try:
            stamps = _stamps_of(name[1])
            known = self._known.get(name)
            loads = getattr(lora_request, "load_inplace", False)
            if known is None or (loads and (known[0] != stamps or known[1] is None)):
                known = self._known[name] = (stamps, self._read(lora_request, name[1]))
        except OSError as error:
            _log.warning("adapter %r cannot be read, and is served without tierkv: %s", name[1], error)
            return None
        if known[0] != stamps and known[1] is not None:
            _log.warning(
                "adapter %r has changed since it was loaded, and is served without tierkv: load it under another "
                "lora_int_id, or restart vLLM",
                name[1],
            )
            known = self._known[name] = (stamps, None)
        return known[1]

    def _read(self, lora_request: Any, place: str) -> str:  # noqa: ANN401 - (the same)
        digest, hashed = folder_digest(place), _hashed(lora_request)
        if self._first.setdefault(hashed, digest) != digest:
            self._replaced.add(hashed)
        return digest

    def check_own_hit(self, lora_request: Any) -> None:  # noqa: ANN401 - (the same)
        """Check the adapter of a request for which vLLM's own cache had a part of the prompt.

        Raises:
            EngineProtocolError: another adapter had its name and path before. vLLM's hashes of both are equal, so that
                part may be KV of the previous one, and must not be stored as that of this one.
        """
        if lora_request is not None and _hashed(lora_request) in self._replaced:
            raise EngineProtocolError(
                f"adapter {lora_request.lora_name!r} replaced another one under the same path, and vLLM's own cache "
                "has KV for this prompt, which may be of the previous one: reset vLLM's prefix cache after such a "
                "change, or load each adapter from a path of its own"
            )


def _hashed(lora_request: Any) -> tuple[str, str]:  # noqa: ANN401 - (the same)
    """Name and path of an adapter: all that vLLM's hashes of blocks have of it."""
    return str(lora_request.lora_name), str(getattr(lora_request, "lora_path", "") or "")


def _stamps_of(place: str) -> _Stamps:
    """Names, sizes and times of change of an adapter's files."""
    found = ((file.name, file.stat()) for file in (_files_of(place) if place else ()))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
