"""Small models with random weights, as folders that vLLM serves: ``python vllm_models.py FOLDER``.

``llama`` has one KV cache group. ``gemma`` mixes sliding windows with full attention, which makes three groups of it.
``gemma2`` has two groups, ``gemma3n`` layers that use the KV of others.
``granite``, ``jamba`` and ``lfm`` have layers that keep a state beside such with attention: Mamba 2, Mamba 1, and short
convolutions.
``deepseek`` has latent attention, ``falcon`` attention and Mamba 2 in each layer, ``qwen3`` odd numbers of heads.
``drafter`` proposes tokens for ``llama``, ``eagle`` and ``eagle3`` for ``terse``, and ``mimo`` for itself (MTP).
``llama4`` has attention inside chunks of the context beside full attention, ``mamba2`` states and no attention at all,
and ``idefics`` sees pictures. ``phi`` computes otherwise where its context may be long.
``french`` and ``german`` are adapters of ``llama``.
Their weights are so wide that a wrong byte in the KV cache changes the greedy tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

VOCABULARY = 1000
WEIGHT_STD = 0.2
SEED = 5
DRAFT_NOISE_STD = 0.005
ADAPTER_RANK = 8
FEW_WORDS = slice(100, 108)
PICTURE_PIXELS = 112
PICTURE_TOKENS = 64
PICTURE_WORDS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
"""Last words of the vocabulary, for the model that sees pictures."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": WEIGHT_STD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def llama() -> PreTrainedModel:
    """Two layers of full attention."""
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **COMMON))


def drafter() -> PreTrainedModel:
    """``llama`` with noise on its weights: it often proposes the token that ``llama`` takes, and often another one."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * DRAFT_NOISE_STD)
    return model


def terse() -> PreTrainedModel:
    """``llama``, but its answers are of a few words only: any head hits the next one now and then."""
    torch.manual_seed(SEED)
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[FEW_WORDS] *= 20
    return model


def gemma() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with a window of two blocks."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(num_hidden_layers=6, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32, **COMMON)
    )


def gemma2() -> PreTrainedModel:
    """Four layers, every other one with a window of two blocks; scores of attention have soft bounds.

    The head is the matrix of embeddings, made small: otherwise each token is answered by itself, whatever is in front.
    """
    kinds = ["sliding_attention", "full_attention"] * 2
    fields = {**COMMON, "tie_word_embeddings": True}
    model = Gemma2ForCausalLM(
        Gemma2Config(num_hidden_layers=4, layer_types=kinds, sliding_window=64, query_pre_attn_scalar=32, **fields)
    )
    with torch.no_grad():
        model.model.embed_tokens.weight *= 0.05
    return model


def gemma3n() -> PreTrainedModel:
    """Six layers like those of ``gemma``, of which the last three use the KV of earlier ones."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    fields = {**COMMON, "tie_word_embeddings": True}
    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            num_hidden_layers=6, layer_types=kinds, sliding_window=64, num_kv_shared_layers=3, laurel_rank=16,
            vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=32,
            activation_sparsity_pattern=[0.0] * 6, **fields,
        )
    )  # fmt: skip


def granite() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with Mamba 2.

    Their states are of heads that forget slowly, so what a state holds of the distant past still counts; and a state
    is smaller than a page of attention, so pages are padded.
    """
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    model = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            num_hidden_layers=6, layer_types=kinds, num_local_experts=0, shared_intermediate_size=256,
            position_embedding_type="rope", attention_multiplier=32**-0.5,
            mamba_expand=1, mamba_n_heads=4, mamba_d_state=16, mamba_chunk_size=32, **COMMON,
        )
    )  # fmt: skip
    return slow_to_forget(model)


def jamba() -> PreTrainedModel:
    """Four layers, every other one with full attention, the others with Mamba 1; they have two experts in turn."""
    sizes = {name: size for name, size in COMMON.items() if name != "head_dim"}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    places = {"attn_layer_period": 2, "attn_layer_offset": 1}
    return slow_to_forget(
        JambaForCausalLM(JambaConfig(num_hidden_layers=4, use_mamba_kernels=False, **experts, **places, **sizes))
    )


def slow_to_forget(model: PreTrainedModel) -> PreTrainedModel:
    """The model with heads of Mamba that forget slowly."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.01, 0.1).log_()
    return model


def mamba2() -> PreTrainedModel:
    """Three layers of Mamba 2, with no attention beside them."""
    sizes = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")}
    tokens = {name: COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    heads = {"num_heads": 8, "head_dim": 32, "state_size": 16, "expand": 2, "n_groups": 1, "chunk_size": 32}
    return slow_to_forget(Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=3, **sizes, **tokens, **heads)))


def llama4() -> PreTrainedModel:
    """Four layers: in three of them, a token sees those of its own 96 tokens of the context, in the last one all."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    sizes = {"intermediate_size_mlp": 256, "attention_chunk_size": 96, "no_rope_layer_interval": 4}
    return Llama4ForCausalLM(Llama4TextConfig(num_hidden_layers=4, **experts, **sizes, **COMMON))


def lfm() -> PreTrainedModel:
    """Six layers, every third one with full attention, the others with short convolutions.

    Ask it one prompt at a time: rounding that differs with the batch is enough to change its tokens.
    """
    kinds = ["conv", "conv", "full_attention"] * 2
    return Lfm2ForCausalLM(
        Lfm2Config(
            num_hidden_layers=6, layer_types=kinds, conv_dim=128, block_dim=128, conv_L_cache=4,
            block_auto_adjust_ff_dim=False, **COMMON,
        )
    )  # fmt: skip


def deepseek() -> PreTrainedModel:
    """Two layers of multi-head latent attention, of the smallest sizes that vLLM's CPU kernels take."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**{key: value for key, value in COMMON.items() if key != "head_dim"}, **sizes},
            num_hidden_layers=2, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2,
            kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32,
        )
    )  # fmt: skip


def qwen3() -> PreTrainedModel:
    """Three layers with three heads of KV each: no power of two anywhere in a page."""
    odd = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **{**COMMON, **odd}))


def falcon() -> PreTrainedModel:
    """Two layers of Falcon-H1, each with attention and Mamba 2 side by side."""
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
    return FalconH1ForCausalLM(FalconH1Config(num_hidden_layers=2, **mamba, **COMMON))


def save_eagle(place: Path, target: PreTrainedModel) -> None:
    """Write heads of one layer that propose from the hidden states of ``target``: for EAGLE, and for EAGLE-3.

    EAGLE's layer reads the output of ``fc`` without a norm, and uses the target's embeddings and last norm. EAGLE-3's
    reads the embedding beside the output of ``fc``, which has the states of three layers of the target.
    """
    head = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **COMMON)).model
    layer = {f"layers.0.{name}": weight for name, weight in head.layers[0].state_dict().items()}
    width = COMMON["hidden_size"]

    def wide(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * WEIGHT_STD

    first = {name: weight for name, weight in layer.items() if "input_layernorm" not in name}
    third = {
        name: wide(weight.shape[0], 2 * width) if name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"} else weight
        for name, weight in layer.items()
    }
    third |= {"layers.0.hidden_norm.weight": torch.ones(width), "norm.weight": torch.ones(width)}
    third["lm_head.weight"] = target.lm_head.weight.detach().clone()
    for name, weights, inputs in (("eagle", first, 2), ("eagle3", third, 3)):
        (place / name).mkdir()
        head.config.architectures = ["LlamaForCausalLM"]
        head.config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        head.config.save_pretrained(place / name)
        file = place / name / "model.safetensors"
        save_file({**weights, "fc.weight": wide(width, inputs * width)}, file, metadata={"format": "pt"})


def mimo() -> PreTrainedModel:
    """Two layers of MiMo, which are those of Qwen2; :func:`save_mimo` adds the layer that proposes tokens."""
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=2, **COMMON))
    with torch.no_grad():
        model.lm_head.weight[FEW_WORDS] *= 20
    return model


def save_mimo(place: Path) -> None:
    """Make MiMo of the folder: its own architecture, and the weights of a layer for MTP beside the model's."""
    file, config = place / "model.safetensors", place / "config.json"
    weights, width = load_file(file), COMMON["hidden_size"]
    extra = {"input_proj.weight": torch.randn(width, 2 * width) * WEIGHT_STD}
    extra |= {
        f"{name}.weight": torch.ones(width) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    block = "model.layers.0."
    extra |= {name.removeprefix(block): weight.clone() for name, weight in weights.items() if name.startswith(block)}
    weights |= {f"model.mtp_layers.0.{name}": weight for name, weight in extra.items()}
    save_file(weights, file, metadata={"format": "pt"})
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(fields), encoding="utf-8")


def phi() -> PreTrainedModel:
    """Two layers whose keys are turned by other factors where a prompt may have more than 256 tokens (LongRoPE)."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    sizes = {name: size for name, size in COMMON.items() if name != "head_dim"}
    config = Phi3Config(
        num_hidden_layers=2, original_max_position_embeddings=256, rope_parameters=rope | factors, **sizes
    )
    return Phi3ForCausalLM(config)


def idefics() -> PreTrainedModel:
    """Two layers of full attention, and two that look at a picture; their weights are as wide."""
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": PICTURE_PIXELS, "patch_size": 14,
    }  # fmt: skip
    text = LlamaConfig(num_hidden_layers=2, **COMMON)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=vision, text_config=text, image_token_id=VOCABULARY - 1, scale_factor=1,
            tie_word_embeddings=False, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("vision" in name or "connector" in name) and parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def save_processor(place: Path) -> None:
    """Write what makes tokens of a picture: it needs neither torchvision nor a network."""
    size = {"longest_edge": PICTURE_PIXELS}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    Idefics3Processor(images, tokenizer(PICTURE_WORDS), image_seq_len=PICTURE_TOKENS).save_pretrained(place)


def save_adapter(place: Path, seed: int) -> None:
    """Write a LoRA adapter for the attention of ``llama``, wide enough to change every answer."""
    torch.manual_seed(seed)
    heads = COMMON["head_dim"] * COMMON["num_attention_heads"], COMMON["head_dim"] * COMMON["num_key_value_heads"]
    weights = {}
    for layer in range(2):
        for name, rows in (("q_proj", heads[0]), ("k_proj", heads[1]), ("v_proj", heads[1])):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(ADAPTER_RANK, COMMON["hidden_size"]) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, ADAPTER_RANK) * 0.3
    place.mkdir()
    save_file(weights, place / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


def tokenizer(last: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per word; the words are w0 to w999, or ``last`` in the place of the last ones."""
    words = {f"w{number}": number for number in range(VOCABULARY - len(last))}
    words |= {word: len(words) + number for number, word in enumerate(last)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.add_special_tokens(list(last))
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="w0", eos_token="w1", unk_token="w2")


def save_models(folder: Path) -> None:
    """Write a folder for each model."""
    plain = (llama, drafter, terse, gemma, gemma2, gemma3n, granite, lfm, deepseek, qwen3, falcon, mimo, phi)
    for make in (*plain, mamba2, jamba, llama4, idefics):
        torch.manual_seed(SEED)
        place = folder / make.__name__
        make().save_pretrained(place)
        tokenizer().save_pretrained(place)
    torch.manual_seed(SEED)
    save_eagle(folder, terse())
    save_mimo(folder / "mimo")
    save_processor(folder / "idefics")
    save_adapter(folder / "french", 1)
    save_adapter(folder / "german", 2)


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
