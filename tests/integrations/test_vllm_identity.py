"""Weights and adapters are distinguished by content: vLLM names them by path only. Needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm import identity
from tierkv.integrations.vllm.identity import Adapters, digest_of, folder_digest, weights_identity, weights_words


def write(folder: Path, content: bytes) -> Path:
    """A folder with one file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("whole_bytes_max", [64 << 20, 1000])
def test_other_content_of_equal_size_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes_max: int
) -> None:
    """Names, shapes and sizes of tensors stay the same when a model is trained on; also in files read in samples."""
    monkeypatch.setattr(identity, "WHOLE_BYTES_MAX", whole_bytes_max)
    first = folder_digest(str(write(tmp_path / "a", b"a" * 100_000)))
    assert folder_digest(str(write(tmp_path / "copy", b"a" * 100_000))) == first
    assert folder_digest(str(write(tmp_path / "a", b"a" * 50_000 + b"b" * 50_000))) != first
    assert folder_digest(str(write(tmp_path / "a", b"a" * 100_001))) != first


def test_a_model_of_the_hub_is_its_commit(tmp_path: Path) -> None:
    """Its name stays the same when its main branch moves; a name that is no folder has nothing to read."""
    assert weights_identity(SimpleNamespace(model="org/m", hf_config=SimpleNamespace(_commit_hash="1f0c"))) == "1f0c"
    assert weights_identity(SimpleNamespace(model="org/m")) == ""
    local = SimpleNamespace(model=str(write(tmp_path, b"weights")), hf_config=SimpleNamespace(_commit_hash=None))
    assert weights_identity(local) == folder_digest(str(tmp_path)) != ""


def test_a_configuration_from_another_folder_is_none_of_the_weights(tmp_path: Path) -> None:
    """With ``--hf-config-path``, a commit of the hub is that of the configuration: the weights are not known by it."""
    weights, config = write(tmp_path / "weights", b"weights"), tmp_path / "config"
    config.mkdir()
    fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "model": str(weights)}
    hub = SimpleNamespace(**fields, hf_config_path="org/m", hf_config=SimpleNamespace(_commit_hash="1f0c"))
    assert weights_identity(hub) == folder_digest(str(weights))
    local = SimpleNamespace(**fields, hf_config_path=str(config))
    words = []
    for text in ("first", "other", "first"):
        (config / "config.json").write_text(text, encoding="utf-8")
        words.append(weights_words(SimpleNamespace(model_config=local, speculative_config=None))["config"])
    assert words[0] == words[2] != words[1]
    assert weights_words(SimpleNamespace(model_config=hub, speculative_config=None))["config"] not in words


@pytest.mark.parametrize(
    ("load_format", "extra", "word"),
    [
        ("auto", {"enable_multithread_load": True}, None),
        ("safetensors", {}, None),
        ("dummy", {}, "dummy"),
        ("tensorizer", {"tensorizer_uri": "/weights"}, f"tensorizer/{digest_of({'tensorizer_uri': '/weights'})}"),
    ],
)
def test_weights_that_are_not_those_of_the_folder_make_another_namespace(
    load_format: str, extra: dict[str, object], word: str | None
) -> None:
    """A server is started with random weights first, for its speed: its chunks are none of the real model."""
    model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides={})
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)
    config = SimpleNamespace(model_config=model, speculative_config=None, load_config=load)
    assert weights_words(config).get("load") == word


def test_weights_outside_the_folder_make_a_namespace_for_each_place_or_content(tmp_path: Path) -> None:
    """VLLM keeps the configuration alone of a model in an object store in its folder."""

    def word(place: object) -> str | None:
        model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides={}, model_weights=str(place))
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None)).get("place")

    assert word("") is None
    assert len({word("s3://models/a"), word("s3://models/a"), word("s3://models/b")}) == 2
    first = word(write(tmp_path, b"first"))
    assert word(write(tmp_path, b"other")) not in (first, None)


@pytest.mark.parametrize(
    ("fields", "is_other"),
    [
        ({}, False),
        ({"lora_dtype": "auto"}, False),
        ({"target_modules": ["q_proj"]}, True),
        ({"enable_tower_connector_lora": True}, True),
        ({"lora_dtype": "bfloat16"}, True),
    ],
)
def test_modules_that_adapters_may_change_make_another_namespace(fields: dict[str, object], is_other: bool) -> None:
    """An adapter has other KV where vLLM takes a part of it only. Without these settings, chunks of the model alone are
    found with adapters and without."""
    model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides={})
    lora = SimpleNamespace(**{"target_modules": None, "lora_dtype": "float32", **fields})
    config = SimpleNamespace(model_config=model, speculative_config=None, lora_config=lora)
    assert ("adapters" in weights_words(config)) is is_other


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("fields", "lengths", "words"),
    [
        pytest.param({"rope_parameters": LONG}, (4096, 4097, 8192), ["short", "long", "long"], id="longrope"),
        pytest.param({"rope_parameters": {"full": LONG}}, (4096, 8192), ["short", "long"], id="by kind of layer"),
        pytest.param({"model_type": "llama4_text"}, (32768, 32769), ["short", "long"], id="llama4"),
        pytest.param({"rope_parameters": {"rope_type": "default"}}, (4096, 8192), [None, None], id="default"),
        pytest.param({}, (4096, 8192), [None, None], id="none"),
    ],
)
def test_the_context_length_counts_where_a_model_computes_otherwise_for_a_long_one(
    fields: dict[str, object], lengths: tuple[int, ...], words: list[str | None]
) -> None:
    """An engine started again with another ``--max-model-len`` keeps its chunks, except where their KV is another."""

    def context(length: int) -> str | None:
        model = SimpleNamespace(
            dtype="float32", quantization=None, hf_overrides={}, max_model_len=length,
            hf_text_config=SimpleNamespace(**fields), try_get_generation_config=dict, override_generation_config={},
        )  # fmt: skip
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None)).get("context")

    assert [context(length) for length in lengths] == words


@pytest.mark.parametrize(
    ("file", "option", "word"),
    [
        ({}, {}, "short"),
        ({"attn_temperature_tuning": True}, {}, "long"),
        ({}, {"attn_temperature_tuning": True}, "long"),
    ],
)
def test_queries_that_llama4_scales_by_configuration_make_another_namespace(
    file: dict[str, object], option: dict[str, object], word: str
) -> None:
    """VLLM takes the choice from the configuration of generation, and otherwise from the context length."""
    model = SimpleNamespace(
        dtype="float32", quantization=None, hf_overrides={}, max_model_len=4096,
        hf_text_config=SimpleNamespace(model_type="llama4_text"),
        try_get_generation_config=lambda: file, override_generation_config=option,
    )  # fmt: skip
    assert weights_words(SimpleNamespace(model_config=model, speculative_config=None))["context"] == word


def test_an_adapter_that_changes_under_a_running_server_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM may hold the old weights or the new: only a request that loads them says so."""
    adapters = Adapters()
    adapter = SimpleNamespace(lora_name="french", lora_int_id=4, lora_path=str(write(tmp_path, b"first")))
    first = adapters.digest_of(adapter)
    assert first
    assert adapters.digest_of(adapter) == first
    write(tmp_path, b"other")
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))  # a change within one tick of the clock counts, too
    assert adapters.digest_of(adapter) is None
    assert adapters.digest_of(adapter) is None
    assert caplog.text.count("has changed since it was loaded") == 1
    anew = SimpleNamespace(**{**vars(adapter), "load_inplace": True})
    assert adapters.digest_of(anew) not in (first, None)
    assert adapters.digest_of(adapter) == adapters.digest_of(anew)


def test_a_hit_of_vllm_is_refused_where_another_adapter_had_the_name_and_path(tmp_path: Path) -> None:
    """VLLM's hashes are of both, so it cannot tell whose KV its own cache has."""
    adapters = Adapters()
    adapter = SimpleNamespace(lora_name="french", lora_int_id=4, lora_path=str(write(tmp_path, b"first")))
    adapters.digest_of(adapter)
    anew = SimpleNamespace(**{**vars(adapter), "load_inplace": True})
    for same in (adapter, anew, SimpleNamespace(**{**vars(adapter), "lora_int_id": 5})):
        adapters.digest_of(same)
        adapters.check_own_hit(same)
    write(tmp_path, b"other one")
    later = SimpleNamespace(**{**vars(adapter), "lora_int_id": 6})
    adapters.digest_of(later)
    with pytest.raises(EngineProtocolError, match="reset vLLM's prefix cache"):
        adapters.check_own_hit(later)
    adapters.check_own_hit(SimpleNamespace(**{**vars(later), "lora_name": "german"}))
    adapters.check_own_hit(None)
