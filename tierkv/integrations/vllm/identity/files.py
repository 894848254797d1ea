"""Identity of the files of a model or an adapter: vLLM names them by path only, and another content is other KV.

A file enters with its name, its size and its content: all of it if the file is small, samples of it otherwise. Times
and the place of the folder do not enter, so copies of one model on several machines are equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

WHOLE_BYTES_MAX = 64 << 20
"""Largest file that is read as a whole."""
SAMPLES = 1024
"""Number of places at which a larger file is read."""
SAMPLE_BYTES = 4096

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_SUFFIXES = {*_WEIGHTS, ".py"}
"""Files of weights, and a model's own code."""
_INDEX = ".safetensors.index.json"
"""End of the name of an index, which says which of the files of weights are read."""
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
_TASKS = ("classification", "clustering", "retrieval", "text-matching")
_PARTS = ("speech_tokenizer", "whisper-large-v3", *(f"adapters/{task}" for task in _TASKS))
"""Folders inside that of a model, from which vLLM reads a part of the model: FunAudioChat, Kimi-Audio, Jina v5."""

_MISTRAL = "consolidated"
"""First word of the names of weights in Mistral's own format."""


def digest_of(value: object) -> str:
    """Digest of a value of a configuration. Of a function, its name."""
    text = json.dumps(value, sort_keys=True, default=lambda item: getattr(item, "__qualname__", str(item)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def model_name(model: object) -> str:
    """Name of a model; of a folder its whole path, because a server may be started in another directory."""
    name = str(model)
    return os.path.abspath(name) if os.path.exists(name) else name  # noqa: PTH100, PTH110 - a link keeps its name


def folder_digest(place: str) -> str:
    """Digest of the weight files of a folder, or of one such file; empty if there are none."""
    digest = hashlib.blake2b(digest_size=16)
    root, files = Path(place), files_of(place)
    for file in files:
        size = file.stat().st_size
        name = file.name if file == root else file.relative_to(root).as_posix()
        digest.update(f"{name} {size}\n".encode())
        _add_content(digest, file, size)
    return digest.hexdigest() if files else ""


def files_of(place: str) -> list[Path]:
    """Files of a folder that count, or the one file; none where ``place`` is empty, or nothing of this machine.

    Folders inside it count where vLLM reads a part of the model from them, or where the weights are nowhere else.
    """
    root = Path(place)
    if not place or root.is_file():
        return [root] if place else []
    if not root.is_dir():
        return []
    found = _counting(root)
    is_elsewhere = not any(file.suffix in _WEIGHTS for file in found)
    inner = {root / part for part in _PARTS} | (set(root.iterdir()) if is_elsewhere else set())
    return sorted([*found, *(file for one in inner if one.is_dir() for file in _counting(one))])


def _counting(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if _counts(file.name, file.suffix) and file.is_file()]


def _counts(name: str, suffix: str) -> bool:
    return suffix in _SUFFIXES or name in _CONFIGS or name.endswith(_INDEX)


def _add_content(digest: Any, file: Path, size: int) -> None:  # noqa: ANN401 - hashlib names no class for it
    with file.open("rb") as data:
        if size <= WHOLE_BYTES_MAX:
            digest.update(data.read())
            return
        for sample in range(SAMPLES):  # the first one has the names and shapes of the tensors
            data.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(data.read(SAMPLE_BYTES))


def read_family(place: str, load_format: str) -> str:
    """Family of the weights that vLLM reads from a folder with several of them; empty for the usual one.

    A model that was trained on in a folder of Mistral's often has the previous weights beside its own, in Mistral's
    format, and ``load_format`` decides which of them are read.
    """
    names = {file.name for file in files_of(place) if file.suffix in _WEIGHTS and file.parent == Path(place)}
    mistral = {name for name in names if name.startswith(_MISTRAL) and name.endswith(".safetensors")}
    families = {
        "mistral": mistral,
        "pt": {name for name in names if name.endswith(".pt")},
        "npcache": {name for name in names if name.endswith(".bin")},
    }
    family = "mistral" if load_format == "auto" and mistral else load_format
    read = families.get(family)
    return family if read and read != names else ""


def reads_params(place: str, config_format: str) -> bool:
    """Whether the configuration is that of Mistral's format, and the folder also has one of the usual format."""
    root = Path(place)
    if not (root / "config.json").is_file() or not (root / "params.json").is_file():
        return False
    has_mistral = any(root.glob(f"{_MISTRAL}*.safetensors"))
    return config_format == "mistral" or (config_format == "auto" and has_mistral)
