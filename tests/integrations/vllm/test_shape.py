"""Translation of vLLM's configuration, with vLLM's own classes, and refused settings."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.config.aux_output import AuxOutputConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tierkv.errors import ConfigError
from tierkv.integrations.vllm.connector.shape import check_hash_seed, engine_spec
from tierkv.types.engine import GroupKind

BLOCKS = 8
HEADS = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float16}
FULL = FullAttentionSpec(block_size=16, **HEADS)
STATE = {"shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.float16, torch.float32)}
ALIGNED = MambaSpec(16, mamba_cache_mode="align", **STATE)
SLIDING = SlidingWindowSpec(block_size=16, sliding_window=64, **HEADS)


def vllm_config(**changes: Any) -> SimpleNamespace:
    """Attributes read from a VllmConfig; ``parallel__world_size=2`` changes ``parallel_config.world_size``."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype=torch.float16,
            quantization=None,
            hf_overrides={},
            get_total_num_kv_heads=lambda: 2,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            kv_cache_layout="LBNHC",
            block_size=16,
            prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            world_size=1,
            nnodes=1,
            nnodes_within_dp=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=0,
        ),
        attention_config=SimpleNamespace(backend=None),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(config, f"{part}_config"), name, value) if name else setattr(config, f"{part}_config", value)
    return config


def kv_cache_config(*specs: Any, **group: Any) -> KVCacheConfig:
    """Groups of two layers, laid out as vLLM lays them out with layers outside."""
    groups, tensors = [], []
    for number, spec in enumerate(specs):
        names = [f"{number}.a", f"{number}.b"]
        groups.append(KVCacheGroupSpec(names, spec, **group))
        page = 4096
        tensors.append(KVCacheTensor(2 * page * BLOCKS, names, page * BLOCKS, page))
    return KVCacheConfig(BLOCKS, tensors, groups, kv_cache_layout="LBNHC", hash_block_size=16)


def test_the_shape_of_a_hybrid_model() -> None:
    """Each group keeps its kind and window; pages are those of the layout."""
    local = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=128, **HEADS)
    spec = engine_spec(vllm_config(parallel__world_size=2), kv_cache_config(FULL, SLIDING, local))
    assert [(group.block_tokens, group.kind, group.window_tokens) for group in spec.groups] == [
        (16, GroupKind.FULL_ATTENTION, None),
        (16, GroupKind.SLIDING_WINDOW, 64),
        (32, GroupKind.CHUNKED_LOCAL, 128),
    ]
    assert {group.page_bytes for group in spec.groups} == {(4096, 4096)}
    assert (spec.model, spec.dtype, spec.hash_block_tokens, spec.num_workers) == ("org/model", "float16", 16, 2)
    assert spec.capabilities.worker_processes


def test_a_group_whose_layers_have_specs_of_their_own() -> None:
    """The scheduler's side has the first of them only; both sides must come to the same."""
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"0.a": FULL, "0.b": FULL})
    assert engine_spec(vllm_config(), kv_cache_config(uniform)) == engine_spec(vllm_config(), kv_cache_config(FULL))


def test_latent_attention_is_full_attention() -> None:
    """MLA keeps one vector per token, of all tokens."""
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float16)
    assert engine_spec(vllm_config(), kv_cache_config(latent)).groups[0].kind is GroupKind.FULL_ATTENTION


def test_ranks_with_equal_pages_store_one_copy() -> None:
    """VLLM says how many ranks hold the same KV in all layers: with heads divided among the ranks, none."""
    two_ranks = vllm_config(parallel__world_size=2)
    assert engine_spec(two_ranks, kv_cache_config(FULL)).groups[0].copies == 1
    assert engine_spec(two_ranks, replace(kv_cache_config(FULL), kv_tp_replicas=2)).groups[0].copies == 2


@pytest.mark.parametrize(
    ("spec", "layout", "workers", "heads"),
    [
        (FULL, "LBNHC", 1, (2, 16)),
        (SLIDING, "LBHNC", 1, (2, 1)),
        (replace(FULL, num_kv_heads=1), "LBHNC", 2, (1, 1)),
        (replace(FULL, num_kv_heads=1), "LBHNC", 4, (0, 1)),  # two workers hold each head
        (FULL, "BLHNC", 1, (0, 1)),
        (replace(FULL, page_size_padded=8192), "LBHNC", 1, (0, 1)),
        (MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float16), "LBHNC", 1, (0, 1)),
        (ALIGNED, "LBHNC", 1, (0, 1)),
    ],
)
def test_heads_by_which_chunks_can_be_divided(spec: Any, layout: str, workers: int, heads: tuple[int, int]) -> None:
    """Only where each worker has its own heads in each page, and where the layout says where they are."""
    config = replace(kv_cache_config(spec), kv_cache_layout=layout)
    group = engine_spec(vllm_config(parallel__world_size=workers), config).groups[0]
    assert (group.heads, group.head_rows) == heads


def test_layers_that_keep_a_state() -> None:
    """Of a state a hit needs the last one only; it has no window in tokens."""
    spec = engine_spec(vllm_config(), kv_cache_config(FULL, ALIGNED))
    assert [(group.kind, group.window_tokens) for group in spec.groups] == [
        (GroupKind.FULL_ATTENTION, None),
        (GroupKind.SSM, None),
    ]


@pytest.mark.parametrize(
    "other",
    [
        replace(ALIGNED, shapes=((8, 3), (2, 4, 4))),
        replace(ALIGNED, dtypes=(torch.float16, torch.float16)),
        replace(ALIGNED, mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ],
    ids=["convolution transposed", "state in half precision", "another kind"],
)
def test_what_a_state_is_changes_the_shape(other: MambaSpec) -> None:
    """Its pages may be as large as they were, and yet hold something else."""
    plain = engine_spec(vllm_config(), kv_cache_config(FULL, ALIGNED))
    assert engine_spec(vllm_config(), kv_cache_config(FULL, ALIGNED)) == plain
    assert engine_spec(vllm_config(), kv_cache_config(FULL, other)) != plain


@pytest.mark.parametrize(
    ("attention", "hash_block", "words"),
    [(FULL, 8, ["prefix_match_unit = 8", "of 16 tokens"]), (replace(FULL, block_size=32), 16, ["16 and 32"])],
)
def test_states_inside_blocks_are_refused(attention: Any, hash_block: int, words: list[str]) -> None:
    """A block may then hold the state of another token than its last: bytes under a wrong name."""
    config = replace(kv_cache_config(attention, ALIGNED), hash_block_size=hash_block)
    with pytest.raises(ConfigError) as caught:
        engine_spec(vllm_config(), config)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"model__quantization": "fp8"},
        {"model__dtype": torch.bfloat16},
        {"model__hf_overrides": {"rope_scaling": {"factor": 2}}},
        {"model__multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 224})},
        {"model__multimodal_config": SimpleNamespace(media_io_kwargs={"video": {"num_frames": 8}})},
        {"model__multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
        {"model__quantization_config": {"ignore": ["lm_head"]}},
        {"model__hf_config_path": "/another/config"},
        {"model__model_class_overrides": {"A": "module:B"}},
        {"load": SimpleNamespace(load_format="dummy")},
        {"cache__kv_cache_dtype_skip_layers": ["0"]},
        {"model__model": "org/other"},
        {"model__revision": "v2"},
        {"cache__cache_dtype": "fp8"},
        {"attention": SimpleNamespace(backend=SimpleNamespace(name="TRITON_ATTN"))},
        {"attention": SimpleNamespace(backend_per_kind={"sliding_window": SimpleNamespace(name="TRITON_ATTN")})},
        {"parallel__world_size": 2},
    ],
    ids=str,
)
def test_what_changes_the_bytes_changes_the_shape(changes: dict[str, Any]) -> None:
    """Two servers that share a tier take each other's chunks exactly where the bytes mean the same."""
    plain = engine_spec(vllm_config(), kv_cache_config(FULL))
    assert engine_spec(vllm_config(), kv_cache_config(FULL)) == plain
    assert engine_spec(vllm_config(**changes), kv_cache_config(FULL)) != plain


@pytest.mark.parametrize("name", ["model.safetensors", "processor_config.json", "params.json", "model.py"])
def test_other_weights_in_the_same_folder_change_the_shape(tmp_path: Path, name: str) -> None:
    """A model that was trained on keeps its path, and the sizes of its files. Pictures may be prepared otherwise."""
    shapes = []
    for content in (b"first", b"other", b"first"):
        (tmp_path / name).write_bytes(content)
        shapes.append(engine_spec(vllm_config(model__model=str(tmp_path)), kv_cache_config(FULL)))
    assert shapes[0] == shapes[2] != shapes[1]


def test_a_folder_has_one_name_from_all_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is started in another directory keeps its chunks."""
    monkeypatch.chdir(tmp_path)
    for name in (".", f"{tmp_path}/"):
        assert engine_spec(vllm_config(model__model=name), kv_cache_config(FULL)).model == str(tmp_path)


def test_a_data_parallel_replica_has_its_number() -> None:
    """Replicas get one configuration, and a place each in tiers that one process at a time may open. vLLM's rank says
    0 in all of them where they need not step together, its index does not."""
    assert engine_spec(vllm_config(), kv_cache_config(FULL)).replica == 0
    second = vllm_config(parallel__data_parallel_index=1, parallel__data_parallel_rank=0)
    assert engine_spec(second, kv_cache_config(FULL)).replica == 1


def test_other_layers_in_a_group_change_the_shape() -> None:
    """Two versions of vLLM may group the layers of one model otherwise, with pages of the same size."""
    config = kv_cache_config(FULL, FULL)
    other = kv_cache_config(FULL, FULL)
    for groups, tensors in ((other.kv_cache_groups, other.kv_cache_tensors),):
        for i, names in enumerate((["0.a", "1.a"], ["0.b", "1.b"])):
            groups[i].layer_names, tensors[i].layers = names, names
    assert engine_spec(vllm_config(), config) != engine_spec(vllm_config(), other)


def drafting(method: str, *, keeps_kv: bool, parallel: bool = False, draft: str = "draft") -> SimpleNamespace:
    """A speculative configuration."""
    model = SimpleNamespace(model=draft, revision=None)
    return SimpleNamespace(
        method=method, uses_draft_kv_cache=lambda: keeps_kv, parallel_drafting=parallel, draft_model_config=model
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel__pipeline_parallel_size": 2}, ["pipeline_parallel_size = 2", "tensor_parallel_size"]),
        ({"parallel__decode_context_parallel_size": 2}, ["decode_context_parallel_size = 2"]),
        ({"parallel__prefill_context_parallel_size": 4}, ["prefill_context_parallel_size = 4"]),
        ({"parallel__nnodes_within_dp": 2, "parallel__nnodes": 2}, ["nnodes = 2", "share a tier"]),
        ({"speculative": drafting("dflash", keeps_kv=True)}, ["method = 'dflash'", "'eagle3'", "'mtp'", "ngram"]),
        ({"speculative": drafting("eagle", keeps_kv=True, parallel=True)}, ["parallel_drafting = True", "False"]),
        (
            {"cache__enable_prefix_caching": False, "scheduler__enable_chunked_prefill": False},
            ["enable_prefix_caching = False", "enable_chunked_prefill = False", "to True", "removing kv_transfer"],
        ),
        (
            {"aux_output": AuxOutputConfig(enable_return_routed_experts=True)},
            ["enable_return_routed_experts = True", "removing kv_transfer_config"],
        ),
        ({"model__is_encoder_decoder": True}, ["an encoder beside its decoder", "removing kv_transfer_config"]),
        (
            {
                "cache__enable_prefix_caching": False,
                "model__multimodal_config": SimpleNamespace(mm_processor_cache_gb=0),
            },
            ["enable_prefix_caching = False and mm_processor_cache_gb = 0", "to True", "--mm-processor-cache-gb"],
        ),
        (
            {
                "model__using_transformers_backend": lambda: True,
                "model__max_model_len": 512,
                "model__hf_text_config": SimpleNamespace(
                    rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 256}
                ),
            },
            ["max_model_len = 512", "'longrope'", "--model-impl vllm", "at most 256", "removing kv_transfer_config"],
        ),
        ({"model__is_diffusion": True}, ["answers by diffusion", "removing kv_transfer_config"]),
        (
            {"model__uses_mrope": True, "model__multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
            ["video_pruning_rate = 0.5", "M-RoPE", "--video-pruning-rate", "removing kv_transfer_config"],
        ),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_served_is_told_what_to_change(changes: dict[str, Any], words: list[str]) -> None:
    """Wrong tokens later would be the alternative."""
    with pytest.raises(ConfigError) as caught:
        engine_spec(vllm_config(**changes), kv_cache_config(FULL))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("kind", "length", "is_library"), [("longrope", 256, True), ("yarn", 512, True), ("longrope", 512, False)]
)
def test_angles_that_do_not_depend_on_other_prompts_are_served(kind: str, length: int, is_library: bool) -> None:
    """All prompts are short, or the factors are those of the configuration, or vLLM chooses them once."""
    rope = {"rope_type": kind, "original_max_position_embeddings": 256}
    config = vllm_config(
        model__using_transformers_backend=lambda: is_library,
        model__max_model_len=length,
        model__hf_text_config=SimpleNamespace(rope_parameters=rope),
    )
    assert engine_spec(config, kv_cache_config(FULL))


@pytest.mark.parametrize(("uses_mrope", "rate"), [(False, 0.5), (True, None), (True, 0.0)])
def test_videos_whose_positions_are_known_before_they_are_seen_are_served(uses_mrope: bool, rate: float | None) -> None:
    """Without M-RoPE a position is the number of tokens in front; without pruning it follows from the size."""
    media = SimpleNamespace(video_pruning_rate=rate)
    assert engine_spec(vllm_config(model__uses_mrope=uses_mrope, model__multimodal_config=media), kv_cache_config(FULL))


@pytest.mark.parametrize("off", ["cache__enable_prefix_caching", "scheduler__enable_chunked_prefill"])
def test_one_way_to_compute_behind_a_prefix_is_enough(off: str) -> None:
    """An engine without a prefix cache of its own still goes on behind the first part of a prompt."""
    assert engine_spec(vllm_config(**{off: False}), kv_cache_config(FULL))


@pytest.mark.parametrize(("caches", "size_gb"), [(False, 4), (True, 0)])
def test_one_cache_is_enough_for_hashes_of_media(size_gb: float, *, caches: bool) -> None:
    """VLLM hashes pictures for any of its two caches."""
    media = SimpleNamespace(mm_processor_cache_gb=size_gb)
    config = vllm_config(cache__enable_prefix_caching=caches, model__multimodal_config=media)
    assert engine_spec(config, kv_cache_config(FULL))


def test_drafts_without_kv_are_served() -> None:
    """N-gram speculation keeps nothing in the KV cache."""
    assert engine_spec(vllm_config(speculative=drafting("ngram", keeps_kv=False)), kv_cache_config(FULL))


def test_another_draft_makes_another_namespace() -> None:
    """Its KV is stored beside the model's, and another draft would propose from it."""
    first, other = (drafting("eagle", keeps_kv=True, draft=draft) for draft in ("draft", "other"))
    shapes = [engine_spec(vllm_config(speculative=one), kv_cache_config(FULL)) for one in (first, other, first)]
    assert shapes[0] == shapes[2] != shapes[1]
    first, other = (drafting("ngram", keeps_kv=False, draft=draft) for draft in ("draft", "other"))
    shapes = [engine_spec(vllm_config(speculative=one), kv_cache_config(FULL)) for one in (first, other, None)]
    assert len(set(shapes)) == 1


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_with_layers_of_their_own_are_served(method: str) -> None:
    """Engines answer in ``test_speculation``; here, that the layers of a draft make another namespace."""
    plain, beside = kv_cache_config(FULL), kv_cache_config(FULL)
    for layers in (beside.kv_cache_groups[0].layer_names, beside.kv_cache_tensors[0].layers):
        layers[-1] = "draft.0"
    config = vllm_config(speculative=drafting(method, keeps_kv=True))
    assert engine_spec(config, beside) != engine_spec(config, plain)


def test_a_group_that_vllm_marks_as_a_draft_s_is_served() -> None:
    """VLLM 0.33 marks the group of all layers where those of an EAGLE head are among them."""
    marked = kv_cache_config(FULL, is_eagle_group=True)
    assert engine_spec(vllm_config(), marked) == engine_spec(vllm_config(), kv_cache_config(FULL))


@pytest.mark.parametrize(
    ("spec", "group", "words"),
    [
        (MambaSpec(16, **STATE), {}, ["mamba_cache_mode = 'none'", "layer 0.a", "enable_prefix_caching"]),
        (MambaSpec(16, mamba_cache_mode="align", num_speculative_blocks=3, **STATE), {}, ["speculative_config"]),
        (CrossAttentionSpec(16, **HEADS), {}, ["CrossAttentionSpec", "'cross_attention'", "0.a to 0.b"]),
        (RSWASpec(block_size=16, rswa_window=32, **HEADS), {}, ["RSWASpec"]),
        (FULL, {"enable_kv_transfer": False}, ["no other request can use"]),
        (FULL, {"host_resident": True}, ["no other request can use"]),
        (FullAttentionSpec(block_size=16, non_causal=True, **HEADS), {}, ["tokens behind them"]),
        (
            UniformTypeKVCacheSpecs(16, kv_cache_specs={"0.a": FULL, "0.b": replace(FULL, non_causal=True)}),
            {},
            ["tokens behind them", "0.a to 0.b"],
        ),
        (SlidingWindowSpec(block_size=16, sliding_window=64, extra_retained_tokens=1, **HEADS), {}, ["speculative"]),
    ],
)
def test_a_group_that_cannot_be_served_is_named(spec: Any, group: dict[str, Any], words: list[str]) -> None:
    """A model of a kind that tierkv does not know yet must not be served by chance."""
    with pytest.raises(ConfigError) as caught:
        engine_spec(vllm_config(), kv_cache_config(spec, **group))
    assert all(word in str(caught.value) for word in words), caught.value


def test_layers_that_read_a_prompt_both_ways_are_named_and_not_the_settings_that_follow() -> None:
    """VLLM switches both settings off for these (HRM-Text), whatever a user writes: they would be no fix."""
    both_ways = kv_cache_config(FullAttentionSpec(block_size=16, non_causal=True, **HEADS))
    off = vllm_config(cache__enable_prefix_caching=False, scheduler__enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="tokens behind them"):
        engine_spec(off, both_ways)


def test_a_model_without_a_kv_cache_is_refused_by_name() -> None:
    """VLLM creates a connector for an encoder of embeddings, too."""
    bare = kv_cache_config(FULL)
    bare.kv_cache_groups.clear()
    with pytest.raises(ConfigError, match=r"no KV cache.*remove kv_transfer_config"):
        engine_spec(vllm_config(), bare)


def test_hashes_that_nobody_else_will_compute_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM seeds them at random then: a restart would find nothing, and nothing would say why."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with caplog.at_level(logging.WARNING):
        assert check_hash_seed(vllm_config())
        assert not caplog.records
        assert not check_hash_seed(vllm_config(cache__prefix_caching_hash_algo="xxhash"))
    assert "PYTHONHASHSEED" in caplog.text
    assert "sha256" in caplog.text
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert check_hash_seed(vllm_config(cache__prefix_caching_hash_algo="xxhash"))
