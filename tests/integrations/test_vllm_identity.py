"""Weights and adapters are distinguished by content: vLLM names them by path only. Needs no vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.identity import files
from tierkv.integrations.vllm.identity.adapters import Adapters, local_place
from tierkv.integrations.vllm.identity.files import digest_of, folder_digest
from tierkv.integrations.vllm.identity.weights import revision_of, weights_identity, weights_words


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
    monkeypatch.setattr(files, "WHOLE_BYTES_MAX", whole_bytes_max)
    first = folder_digest(str(write(tmp_path / "a", b"a" * 100_000)))
    assert folder_digest(str(write(tmp_path / "copy", b"a" * 100_000))) == first
    assert folder_digest(str(write(tmp_path / "a", b"a" * 50_000 + b"b" * 50_000))) != first
    assert folder_digest(str(write(tmp_path / "a", b"a" * 100_001))) != first


def test_an_index_and_folders_inside_a_model_count_where_vllm_reads_them(tmp_path: Path) -> None:
    """An index says which files are read; some models have parts in folders of their own, or all of their weights."""
    write(tmp_path, b"weights")
    seen = [folder_digest(str(tmp_path))]
    for place, counts in [
        ("model.safetensors.index.json", True),
        ("whisper-large-v3/model.safetensors", True),
        ("adapters/retrieval/adapter_model.safetensors", True),
        ("adapters/french/adapter_model.safetensors", False),
        ("original/consolidated.00.pth", False),
        ("checkpoint-500/model.safetensors", False),
    ]:
        (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / place).write_bytes(b"more")
        seen.append(folder_digest(str(tmp_path)))
        assert (seen[-1] not in seen[:-1]) is counts, place
    (tmp_path / "model.safetensors").unlink()
    alone = folder_digest(str(tmp_path))
    (tmp_path / "checkpoint-500" / "model.safetensors").write_bytes(b"others")
    assert folder_digest(str(tmp_path)) != alone


class Revision(str):
    """A revision with its commit, as vLLM has it from the hub's client."""

    __slots__ = ("__dict__",)
    resolved: str


def resolved(revision: str, commit: str) -> Revision:
    """The revision, of which the hub's client knows the commit."""
    found = Revision(revision)
    found.resolved = commit
    return found


def test_a_model_of_the_hub_is_its_commit_however_its_revision_is_named(tmp_path: Path) -> None:
    """Its name stays the same when its main branch moves; of a folder, a revision says nothing."""
    folder = str(write(tmp_path, b"weights"))
    for model, revision, expected in [
        ("org/m", resolved("main", "1f0c"), "1f0c"),
        ("org/m", resolved("1f0c", "1f0c"), "1f0c"),
        ("org/m", resolved("main", "2e1d"), "2e1d"),
        ("org/m", "v2", "v2"),
        ("org/m", None, ""),
        (folder, "v2", folder_digest(folder)),
    ]:
        assert revision_of(SimpleNamespace(model=model, revision=revision)) == expected


def test_a_configuration_from_another_folder_is_none_of_the_weights(tmp_path: Path) -> None:
    """With ``--hf-config-path``, the revision of the configuration is none of the weights."""
    weights, config = write(tmp_path / "weights", b"weights"), tmp_path / "config"
    config.mkdir()
    fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "model": str(weights)}
    local = SimpleNamespace(**fields, hf_config_path=str(config))
    words: list[Any] = []
    for commit in ("1f0c", "2e1d", "1f0c"):
        revision = resolved("main", commit)
        hub = SimpleNamespace(**fields, hf_config_path="org/m", revision=None, _hf_config_revision=revision)
        assert weights_identity(hub) == folder_digest(str(weights))
        words.append(weights_words(SimpleNamespace(model_config=hub, speculative_config=None))["config"])
    assert words[0] == words[2] != words[1]
    words.clear()
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


@pytest.mark.parametrize(
    ("load_format", "config_format", "others", "words"),
    [
        ("auto", "auto", [], (None, None)),
        ("auto", "auto", ["consolidated.safetensors", "params.json"], ("mistral", True)),
        ("mistral", "mistral", ["consolidated.safetensors", "params.json"], ("mistral", True)),
        ("hf", "hf", ["consolidated.safetensors", "params.json"], (None, None)),
        ("safetensors", "auto", ["consolidated.safetensors"], (None, None)),
        ("pt", "auto", ["model.pt"], ("pt", None)),
        ("npcache", "auto", ["pytorch_model.bin"], ("npcache", None)),
        ("auto", "ours", [], (None, True)),
    ],
)
def test_one_folder_with_several_models_makes_a_namespace_for_each(
    tmp_path: Path, load_format: str, config_format: str, others: list[str], words: tuple[str | None, bool | None]
) -> None:
    """A model that was trained on in Mistral's folder: the previous weights are still there, in their format."""
    for name in ("config.json", *others):
        (write(tmp_path, b"weights") / name).write_bytes(b"{}")
    fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "config_format": config_format}
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), **fields),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=None,
    )
    found = weights_words(config)
    assert (found.get("load"), "format" in found or None) == words


def test_a_function_that_overrides_the_configuration_counts_by_its_result() -> None:
    """Its name says nothing of what it does; the place of the model and a version say nothing of the model."""

    def word(theta: float, place: str = "/a") -> str:
        values = {"rope_theta": theta, "_name_or_path": place, "transformers_version": place}
        config = SimpleNamespace(to_dict=lambda: values)
        model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides=lambda given: given, hf_config=config)
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None))["overrides"]

    assert word(1.0) == word(1.0, "/b") != word(2.0)


def test_another_revision_of_the_code_of_a_model_makes_another_namespace() -> None:
    """The code of a model on the hub may be in another place than its weights."""

    def words(revision: str | None) -> dict[str, str]:
        fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "code_revision": revision}
        return weights_words(SimpleNamespace(model_config=SimpleNamespace(**fields), speculative_config=None))

    assert words("a") != words("b") != words(None)
    assert "code" not in words(None)


@pytest.mark.parametrize("name", ["VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"])
def test_a_variable_that_changes_the_kv_makes_another_namespace(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No field of vLLM's configuration shows it: a server for a benchmark has filled the disk with other KV."""
    model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides={})

    def word(value: str) -> str | None:
        monkeypatch.setenv(name, value)
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None)).get("environment")

    assert word("") is None
    assert len({word("a"), word("a"), word("b"), None}) == 3


def test_the_model_of_a_plugin_has_chunks_of_its_own() -> None:
    """A plugin of vLLM may register a class for the name of an architecture that vLLM has, by its name or itself."""

    def word(registered: object) -> str | None:
        registry = SimpleNamespace(models={"Llama": registered})
        fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "architecture": "Llama"}
        model = SimpleNamespace(registry=registry, **fields)
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None)).get("plugin")

    def named(module: str) -> SimpleNamespace:
        return SimpleNamespace(module_name=module, class_name="Llama")

    imported = SimpleNamespace(model_cls=Revision)
    assert word(named("vllm.model_executor.models.llama")) is word(named("vllm.models.llama")) is word(None) is None
    assert len({word(named("ours")), word(named("theirs")), word(imported), None}) == 4


def test_a_folder_of_one_format_keeps_its_namespace(tmp_path: Path) -> None:
    """All settings read the same files there, so a change of the setting loses no chunk."""
    for name in ("consolidated.safetensors", "params.json"):
        (tmp_path / name).write_bytes(b"{}")
    fields = {"dtype": "float32", "quantization": None, "hf_overrides": {}, "model": str(tmp_path)}
    for kind in ("auto", "mistral"):
        model = SimpleNamespace(config_format=kind, **fields)
        load = SimpleNamespace(load_format=kind)
        words = weights_words(SimpleNamespace(model_config=model, load_config=load, speculative_config=None))
        assert not {"load", "format"} & set(words)


def test_models_that_are_a_part_of_another_count_by_content_or_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ultravox names its text model: a folder that is trained on, or a model whose main branch moves on the hub."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def word(place: object, commit: str = "1f0c") -> str | None:
        refs = tmp_path / "hub" / "models--org--m" / "refs"
        refs.mkdir(parents=True, exist_ok=True)
        (refs / "main").write_text(commit, encoding="utf-8")
        config = SimpleNamespace(text_model_id=place, audio_model_id=None)
        model = SimpleNamespace(dtype="float32", quantization=None, hf_overrides={}, hf_config=config)
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None)).get("parts")

    assert word(None) is None
    assert len({word("org/m"), word("org/m"), word("org/m", "2e1d"), word("org/n")}) == 3
    first = word(write(tmp_path / "folder", b"first"))
    assert word(write(tmp_path / "folder", b"other")) not in (first, None)


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


@pytest.mark.parametrize("is_library", [True, False])
def test_the_model_of_the_transformers_library_has_chunks_of_its_own(is_library: bool) -> None:
    """It names its layers as vLLM's own does, and computes otherwise, such as LongRoPE for short prompts."""
    model = SimpleNamespace(
        dtype="float32", quantization=None, hf_overrides={}, using_transformers_backend=lambda: is_library
    )
    words = weights_words(SimpleNamespace(model_config=model, speculative_config=None))
    assert (words.get("model") == "transformers") is is_library


@pytest.mark.parametrize(
    ("tokenizer", "has_pictures", "counts"),
    [("mistral", True, True), ("mistral", False, False), ("plain", True, False), ("model", True, False)],
)
def test_a_tokenizer_that_prepares_pictures_counts_by_its_content(
    tmp_path: Path, tokenizer: str, has_pictures: bool, counts: bool
) -> None:
    """VLLM hashes the raw picture, and one of Mistral's tokenizers says in how many pieces it is cut."""
    for name in ("model", "plain", "mistral"):
        (tmp_path / name).mkdir()
    file = tmp_path / "mistral" / "tekken.json"

    def words(content: str) -> dict[str, str]:
        file.write_text(content, encoding="utf-8")
        model = SimpleNamespace(
            dtype="float32", quantization=None, hf_overrides={}, model=tmp_path / "model",
            tokenizer=tmp_path / tokenizer, multimodal_config=SimpleNamespace() if has_pictures else None,
        )  # fmt: skip
        return weights_words(SimpleNamespace(model_config=model, speculative_config=None))

    first = words("a")
    assert words("a") == first
    assert ("tokenizer" in first) is (words("b") != first) is counts


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
TRAINED = DYNAMIC | {"max_trained_positions": 2048}


@pytest.mark.parametrize(
    ("fields", "lengths", "words"),
    [
        pytest.param({"rope_parameters": LONG}, (4096, 4097, 8192), ["short", "long", "long"], id="longrope"),
        pytest.param({"rope_parameters": {"full": LONG}}, (4096, 8192), ["short", "long"], id="by kind of layer"),
        pytest.param({"model_type": "llama4_text"}, (32768, 32769), ["short", "long"], id="llama4"),
        pytest.param({"rope_parameters": {"rope_type": "default"}}, (4096, 8192), [None, None], id="default"),
        pytest.param(
            {"model_type": "minimax_m2", "rope_parameters": TRAINED}, (4096, 8192), ["4096", "8192"], id="dynamic"
        ),
        pytest.param(
            {"model_type": "plamo3", "rope_parameters": {"full": LONG}},
            (4096, 8192, 8193),
            ["short/4096", "long/8192", "long/8193"],
            id="measured longrope",
        ),
        pytest.param(
            {"model_type": "minimax_m2", "rope_parameters": DYNAMIC}, (4096, 8192), [None, None], id="equal positions"
        ),
        pytest.param({"model_type": "llama", "rope_parameters": TRAINED}, (4096, 8192), [None, None], id="configured"),
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


def test_an_adapter_is_found_where_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path may begin with the home of the user, or be relative."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    expected = folder_digest(str(write(tmp_path / "french", b"first")))
    for number, place in enumerate((str(tmp_path / "french"), "~/french", "french")):
        adapter = SimpleNamespace(lora_name="french", lora_int_id=number + 1, lora_path=place)
        assert Adapters().digest_of(adapter) == expected, place
    gone = SimpleNamespace(lora_name="gone", lora_int_id=9, lora_path=str(tmp_path / "gone"))
    assert Adapters().digest_of(gone) == ""


def test_an_adapter_of_the_hub_counts_by_its_files_once_vllm_has_fetched_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its first request vLLM may fetch newer files than those that the cache of the hub has."""
    kept: dict[str, str] = {}
    hub = SimpleNamespace(try_to_load_from_cache=lambda name, file: kept.get(f"{name}/{file}"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    adapter = SimpleNamespace(lora_name="french", lora_int_id=4, lora_path="org/french")
    adapters = Adapters()
    assert local_place("org/french") is None
    kept["org/french/adapter_config.json"] = str(write(tmp_path / "old", b"old") / "adapter_config.json")
    assert adapters.digest_of(adapter) is None, "vLLM has not loaded it"
    kept["org/french/adapter_config.json"] = str(write(tmp_path / "new", b"newer") / "adapter_config.json")
    adapters.note_served(adapter)
    assert adapters.digest_of(adapter) == folder_digest(str(tmp_path / "new"))
    assert adapters.digest_of(SimpleNamespace(**{**vars(adapter), "load_inplace": True})) is None
    other = SimpleNamespace(lora_name="german", lora_int_id=5, lora_path="org/german")
    for _ in range(2):
        assert adapters.digest_of(other) is None
        adapters.note_served(other)
    assert caplog.text.count("in no folder of this machine") == 1


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
