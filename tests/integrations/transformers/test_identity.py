"""Identity of KV: a change of what the model computes must hide chunks computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hf_models import GREEDY, VOCAB, greedy, make_model, make_prompt

from tierkv.integrations.transformers.identity import Identity, adapter_name, block_hashes, prompt_tokens_max

PROMPT = make_prompt(100)


def found(cache: Any, **more: Any) -> int:
    """Tokens of the prompt that the tiers have."""
    return int(cache.load(PROMPT, **more).tokens)


def test_weights_that_change_in_place(open_cache: Callable[..., Any]) -> None:
    """A step of training, a merge, a new checkpoint into the same object: everything before is of another model.
    Put back, it is found again."""
    served = make_model("llama")
    cache = open_cache(served)
    cache.prefill(PROMPT)
    assert found(cache) == 96
    weight = served.model.layers[1].mlp.up_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.01)
    assert found(cache) == 0
    with torch.no_grad():
        weight.copy_(before)
    assert found(cache) == 96


def test_a_weight_that_is_replaced(open_cache: Callable[..., Any]) -> None:
    """`model.load_state_dict(assign=True)` and friends give a module other tensors, whose version is as young."""
    served = make_model("llama")
    cache = open_cache(served)
    cache.prefill(PROMPT)
    norm = served.model.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 1.01)
    assert found(cache) == 0


def test_models_of_one_name_do_not_share_and_copies_do(open_cache: Callable[..., Any]) -> None:
    """Fine-tuned models often keep the name of their folder; a copy of a model is the same model."""
    with open_cache(make_model("llama")) as cache:
        cache.prefill(PROMPT)
    with open_cache(make_model("llama", seed=1)) as other:
        assert found(other) == 0
    assert found(open_cache(make_model("llama"))) == 96


def test_what_the_configuration_says(open_cache: Callable[..., Any]) -> None:
    """Same weights under another constant compute other K."""
    served = make_model("llama")
    first = Identity(served).root()
    served.config.rms_norm_eps *= 10
    assert Identity(served).root() != first
    served = make_model("llama")
    served.config.name_or_path = "elsewhere/entirely"
    served.config.use_cache = False
    assert Identity(served).root() == first


def test_the_attention_kernel(open_cache: Callable[..., Any]) -> None:
    """Kernels round differently: restored KV must equal computed KV bit for bit."""
    served = make_model("llama")
    first = Identity(served).root()
    served.set_attn_implementation("eager")
    assert Identity(served).root() != first


def test_autocast_does_not_share(open_cache: Callable[..., Any]) -> None:
    """KV that was computed with fewer bits has the dtype of the weights in some models, and gives other tokens."""
    served, tokens = make_model("llama"), make_prompt(64)
    cache = open_cache(served)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.prefill(tokens)
        assert cache.load([*tokens, 5]).tokens == 64
    assert cache.load([*tokens, 5]).tokens == 0
    with torch.autocast("cpu", dtype=torch.float16):
        assert cache.load([*tokens, 5]).tokens == 0
    cache.prefill(tokens)
    assert cache.load([*tokens, 5]).tokens == 64


def test_dtypes_do_not_share(open_cache: Callable[..., Any]) -> None:
    """bf16 and fp16 pages have the same size, and another meaning."""
    with open_cache(make_model("llama", torch.bfloat16)) as cache:
        cache.prefill(PROMPT)
    assert found(open_cache(make_model("llama", torch.float16))) == 0


def test_block_sizes_do_not_share(open_cache: Callable[..., Any]) -> None:
    """A block of 16 tokens is no block of 32."""
    with open_cache(make_model("llama")) as cache:
        cache.prefill(PROMPT)
    assert found(open_cache(make_model("llama"), block_tokens=32)) == 0


def test_tenants_do_not_share(open_cache: Callable[..., Any]) -> None:
    """One user's prompt must not be detectable by another user."""
    cache = open_cache(make_model("llama"))
    cache.prefill(PROMPT, cache_salt="alice")
    assert [found(cache, cache_salt=salt) for salt in ("alice", "bob", None)] == [96, 0, 0]
    cache.generate(PROMPT, cache_salt="bob", **GREEDY)
    assert cache.last_prompts[0].loaded_tokens == 0
    assert found(cache, cache_salt="bob") == 96


def test_hints_reach_the_stack(open_cache: Callable[..., Any]) -> None:
    """Hints of users have the same effect as in any engine."""
    cache = open_cache(make_model("llama"))
    cache.prefill(PROMPT, hints={"max_offload_tokens": 48})
    assert found(cache) == 48
    assert found(cache, hints={"max_load_tokens": 20}) == 20
    cache.prefill(make_prompt(80, seed=5), hints={"store": False})
    assert cache.load(make_prompt(80, seed=5)).tokens == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's, about transformers
class TestAdapters:
    """PEFT's, by what every adapter layer of it tells."""

    @staticmethod
    def adapted() -> Any:
        peft = pytest.importorskip("peft")
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "k_proj"], init_lora_weights=False)
        return peft.get_peft_model(make_model("llama"), config, adapter_name="mine").eval()

    def test_each_adapter_has_its_own(self, open_cache: Callable[..., Any]) -> None:
        """An adapter changes K and V of every layer; switched off, the plain model's prefixes are back."""
        with open_cache(make_model("llama")) as plain:
            plain.prefill(PROMPT)
        served = self.adapted()
        cache = open_cache(served)
        assert adapter_name(served) == "mine"
        assert found(cache) == 0
        ids = torch.tensor([PROMPT])
        assert torch.equal(cache.generate(ids, **GREEDY), greedy(served, ids))
        assert found(cache) == 96
        with served.disable_adapter():
            assert adapter_name(served) is None
            assert found(cache) == 0
        assert found(cache) == 96

    def test_a_merge_and_a_scale_are_changes(self, open_cache: Callable[..., Any]) -> None:
        """Both change K and V without changing which adapter is active."""
        served = self.adapted()
        roots = {Identity(served).root()}
        layers = [module for module in served.modules() if hasattr(module, "merged_adapters")]
        assert layers
        for layer in layers:
            layer.scaling["mine"] *= 2
        roots.add(Identity(served).root())
        served.merge_adapter()
        roots.add(Identity(served).root())
        assert len(roots) == 3


class TestLengthDependentPositions:
    """Rotary embeddings that change for all positions once a text is long: its prefix is another one then."""

    @staticmethod
    def model(kind: str) -> Any:
        more = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
        if kind == "longrope":
            more |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 128}
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=512 if kind == "longrope" else 128, eos_token_id=None,
            **{"rope_parameters" if int(transformers.__version__[0]) > 4 else "rope_scaling": more},
        )  # fmt: skip
        served = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in served.parameters():
                parameter.normal_(0, 0.2)
        return served

    @pytest.mark.parametrize("kind", ["longrope", "dynamic"])
    def test_long_texts_are_left_alone(self, kind: str, open_cache: Callable[..., Any]) -> None:
        """The prefix of a short text is wrong for a long one, and what a long one computes in pieces is, too."""
        served = self.model(kind)
        assert prompt_tokens_max(served) == 128
        cache = open_cache(served)
        short, long = torch.tensor([PROMPT]), torch.tensor([PROMPT + make_prompt(100, seed=1)])
        for _ in range(2):
            assert torch.equal(cache.generate(short, **GREEDY), greedy(served, short))
            # This is how transformers goes on when the text becomes too long while it is generated.
            assert torch.equal(cache.generate(long, **GREEDY), greedy(served, long))
            assert cache.last_prompts[0].loaded_tokens == cache.last_prompts[0].offered_tokens == 0
        assert cache.load(long).tokens == 0
        assert cache.prefill(long).tokens == 0
        assert found(cache) == 96

    def test_others_have_no_limit(self, model: Callable[..., Any]) -> None:
        """Most models; nothing is to be lost there."""
        assert prompt_tokens_max(model("llama")) is None
        assert prompt_tokens_max(model("gemma3")) is None
        assert prompt_tokens_max(model("gpt2")) is None


def test_hashes_are_those_of_every_version() -> None:
    """Chunks at rest are found by them: a change would make every cache cold. A golden value."""
    first, second = block_hashes(bytes(16), [1, 2, 3, 4, 5], 2)
    assert (first.hex(), second.hex()) == ("9b39f61446f7f52a663c2618142dda11", "5b6798ca2e2cce16ab7d28146f00513a")
