"""Unsupported models and inputs are refused by name with the fix, and never give wrong results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hf_models import GREEDY, VOCAB, computed_in_pieces, make_model, make_prompt

from tierkv.errors import ConfigError, EngineProtocolError, EngineVersionError
from tierkv.integrations.transformers import TieredPrefixCache
from tierkv.integrations.transformers.layers import cache_option
from tierkv.integrations.transformers.versions import ENGINE

TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**TINY, "intermediate_size": 64, "num_attention_heads": 4}


def _mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**TINY))


def _t5() -> Any:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def _linear_attention() -> Any:
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this version of transformers has no such model")
    config = transformers.Qwen3NextConfig(
        **HEADS, num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def _shared_by_layers() -> Any:
    if not hasattr(transformers.cache_utils, "DummyLayer"):
        pytest.skip("this version of transformers has no such layers")
    config = transformers.Gemma3nTextConfig(
        **{**HEADS, "num_hidden_layers": 4}, num_key_value_heads=2, head_dim=8, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, laurel_rank=8,
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


def _both_ways() -> Any:
    return transformers.BertLMHeadModel(transformers.BertConfig(**HEADS, is_decoder=False))


def _window_in_the_cache_alone() -> Any:
    sizes = {**TINY, "ffn_dim": 64, "num_attention_heads": 4, "sliding_window": 24}
    return transformers.MoshiForCausalLM(transformers.MoshiConfig(**sizes))


def _one_token_at_a_time() -> Any:
    config = transformers.ProphetNetConfig(
        vocab_size=VOCAB, hidden_size=32, num_encoder_layers=2, num_decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_encoder_attention_heads=4, num_decoder_attention_heads=4, is_encoder_decoder=False,
    )  # fmt: skip
    return transformers.ProphetNetForCausalLM(config)


def _wants_all_tokens() -> Any:
    config = transformers.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, causal=True)
    return transformers.XLMWithLMHeadModel(config)


def _positions_beside_the_cache() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    name = "rope_parameters" if int(transformers.__version__[0]) > 4 else "rope_scaling"
    served = transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS))
    setattr(served.config, name, rope)
    return served


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_positions_beside_the_cache, "mrope"),
        (_mamba, "linear_attention|keep a state|no model"),
        (_t5, "encoder-decoder"),
        (_linear_attention, "linear_attention"),
        (_shared_by_layers, "Gemma3nForCausalLM: layer 2 of its KV cache is a DummyLayer"),
        (_window_in_the_cache_alone, "MoshiForCausalLM .* depends on the pieces"),
        (_one_token_at_a_time, "ProphetNetForCausalLM does not compute several tokens behind"),
        (_wants_all_tokens, "XLMWithLMHeadModel does not compute several"),
        (_both_ways, "attends to later tokens"),
        (lambda: torch.nn.Linear(2, 2), "no model of transformers"),
    ],
    ids=[
        "mrope",
        "state",
        "encoder-decoder",
        "linear",
        "shared",
        "pieces",
        "one token",
        "all tokens",
        "both ways",
        "no model",
    ],
)
def test_models_without_kv_per_token_of_a_prefix(make: Callable[[], Any], says: str, open_cache: Any) -> None:
    """Their caches are no K and V that a prefix of tokens determines; a wrong answer would be silent."""
    with pytest.raises(ConfigError, match=says):
        open_cache(make().eval())


def test_a_model_in_training(open_cache: Callable[..., Any]) -> None:
    """Dropout makes KV random; also when it is switched on later."""
    served = make_model("llama")
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        open_cache(served.train())
    cache = open_cache(served.eval())
    served.train()
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        cache.load(make_prompt(20))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"inputs_embeds": torch.zeros(1, 20, 32)}, "inputs_embeds: chunks are found by their token ids"),
        ({"position_ids": torch.arange(20)[None] + 3}, "position_ids: chunks are found"),
        ({"use_cache": False}, "pass use_cache=True"),
        ({"generation_config": transformers.GenerationConfig(use_cache=False)}, r"model\.generation_config"),
        ({"cache_implementation": "static"}, "cache_implementation = 'static'"),
        ({"generation_config": transformers.GenerationConfig(cache_implementation="static")}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3 .* empty cache"),
        ({"assistant_model": torch.nn.Linear(1, 1)}, "assistant_model = Linear"),
        ({"prefill_chunk_size": 8}, "piece_tokens"),
        ({"past_key_values": transformers.DynamicCache()}, "creates its own"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_generate(
    arguments: dict[str, Any], says: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """They would change KV without changing tokens, or take the prefix's place. (transformers itself gives wrong
    tokens, not an error, when assisted decoding starts from a cache with content.)"""
    if isinstance(arguments.get("past_key_values"), transformers.DynamicCache):
        arguments = {"past_key_values": computed_in_pieces(model("llama"), make_prompt(5), (5,))}
    cache = open_cache(model("llama"))
    with pytest.raises(ValueError, match=says):
        cache.generate(make_prompt(20), **{**GREEDY, **arguments})


@pytest.mark.parametrize(
    ("stored", "kind", "says"),
    [
        (lambda served: transformers.StaticCache(config=served.config, max_cache_len=64), TypeError, "StaticCache"),
        (lambda served: [(1, 2)], TypeError, "list"),
        (lambda served: transformers.DynamicCache(), ValueError, "0 layers"),
        (lambda served: computed_in_pieces(make_model("llama", torch.bfloat16), make_prompt(32), (32,)),
         ValueError, "bfloat16"),
        (lambda served: computed_in_pieces(make_model("gpt2"), make_prompt(32), (32,)), ValueError, "does not belong"),
    ],
    ids=["static", "list", "empty", "dtype", "other model"],
)  # fmt: skip
def test_caches_that_are_not_this_models(
    stored: Callable[[Any], Any], kind: type[Exception], says: str, model: Callable[..., Any], open_cache: Any
) -> None:
    """Storing one would put foreign bytes under this model's keys; and nothing of it is found afterwards."""
    served = model("llama")
    cache = open_cache(served)
    with pytest.raises(kind, match=says):
        cache.store(make_prompt(32), stored(served))
    assert cache.load(make_prompt(33)).tokens == 0
    assert cache.stack.metrics.counters.chunks_stored == 0


def test_a_cache_of_other_tokens(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """A restored cache knows whose tokens it holds: storing it under others is an error, not a poisoned prefix."""
    served, tokens = model("llama"), make_prompt(64)
    cache = open_cache(served)
    past = cache.prefill(tokens).past_key_values
    with torch.no_grad():
        served(input_ids=torch.tensor([make_prompt(16, seed=3)]), **cache_option(served, past), use_cache=True)
    with pytest.raises(ValueError, match="is not what this cache was loaded for"):
        cache.store(make_prompt(80, seed=9), past)
    with pytest.raises(ValueError, match="2"):
        cache.store([tokens, tokens], past)


@pytest.mark.parametrize("prompt", ["a text", ["a text"], {"input_ids": [[1, 2]]}], ids=["text", "texts", "mapping"])
def test_texts_are_no_ids(model: Callable[..., Any], open_cache: Callable[..., Any], prompt: Any) -> None:
    """The first mistake of a user who has a tokenizer at hand."""
    with pytest.raises(ValueError, match=r"give ids, as tokenizer\(text\).input_ids"):
        open_cache(model("llama")).prefill(prompt)


@pytest.mark.parametrize("nothing", ["", None, 3])
def test_no_folder_is_not_the_working_directory(model: Callable[..., Any], nothing: Any) -> None:
    """An unset variable must not fill the folder that a program happens to run in."""
    with pytest.raises(ConfigError, match=r"stack = .*: give a folder for the chunks"):
        TieredPrefixCache(model("llama"), nothing)


def test_the_cache_has_the_name_that_the_model_knows() -> None:
    """Transformers 5.24 renames `past_key_values`: the old name costs a warning there, and later an error."""

    class Renamed:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    class Former:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Adapted:
        def get_base_model(self) -> Any:
            return Renamed()

    given = object()
    assert cache_option(Renamed(), given) == cache_option(Adapted(), given) == {"cache": given}
    assert cache_option(Former(), given) == {"past_key_values": given}


def test_two_threads_and_the_end(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Two threads would mix up one stack's steps; a closed cache has no stack. Both are refused, and nothing hangs."""
    cache = open_cache(model("llama"))
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def wait_inside(module: Any, args: Any, kwargs: Any) -> None:
        inside.set()
        assert go_on.wait(30)

    hook = cache._model.register_forward_pre_hook(wait_inside, with_kwargs=True)
    thread = threading.Thread(target=cache.prefill, args=(make_prompt(20),))
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(EngineProtocolError, match="another thread"):
            cache.load(make_prompt(20))
    except BaseException as error:  # noqa: BLE001 - the thread must end first
        errors.append(error)
    finally:
        go_on.set()
        thread.join()
        hook.remove()
    assert not errors
    assert cache.close()
    assert cache.close()
    with pytest.raises(EngineProtocolError, match="closed"):
        cache.load(make_prompt(20))


@pytest.mark.parametrize(("option", "value"), [("block_tokens", 0), ("piece_tokens", -1), ("block_tokens", None)])
def test_sizes(option: str, value: int | None, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """A size of nothing would loop for ever."""
    with pytest.raises(ConfigError, match=f"{option} = {value}"):
        open_cache(model("llama"), **{option: value})


@pytest.mark.parametrize("version", ["4.55.4", "4.9.0", "6.0.0", "main"])
def test_versions_that_are_not_served(version: str) -> None:
    """The error names those that are."""
    with pytest.raises(EngineVersionError, match=rf"{version}.*4\.56 and later, below 6\.0"):
        ENGINE.check(version)


@pytest.mark.parametrize("version", ["4.56.0", "4.57.6", "5.0.0", "5.19.0", "5.23.0", "5.24.0.dev0"])
def test_versions_that_are_served(version: str) -> None:
    """A patch release is always accepted."""
    ENGINE.check(version)


def test_the_package_loads_nothing_until_asked() -> None:
    """Neither torch nor transformers, which take seconds; and without transformers the error says what to install."""
    program = """
import sys
import tierkv.integrations.transformers as here
assert not {"torch", "transformers"} & sys.modules.keys()
sys.modules["transformers"] = None
from importlib import metadata
real = metadata.version
def version(name):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
try:
    here.TieredPrefixCache
except ImportError as error:
    assert "pip install torch 'transformers>=4.56,<6.0'" in str(error), error
else:
    raise AssertionError
try:
    here.Nonsense
except AttributeError as error:
    assert "TieredPrefixCache" in str(error)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
