"""Checks of vLLM's configuration that both seams need: whether loaded tokens can be used, and whether stores survive.

Each function takes vLLM's ``VllmConfig``. The connector gets it from vLLM. The spec reads it in its workers, because
``OffloadingConfig`` lacks these settings.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any

from tierkv.config.schema import StackConfig
from tierkv.errors import ConfigError
from tierkv.integrations.vllm.identity.weights import ropes_of, uses_transformers

_log = logging.getLogger(__name__)

DRAFTS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculation whose draft has a KV cache that tierkv stores and loads."""


def check_model(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's, which has no types here
    """Check that an answer depends on the KV of a prompt, and this on the prompt, as vLLM hashes it, alone.

    Raises:
        ConfigError: the answer needs more of a prompt's tokens than their KV, the model has an encoder, or positions
            that only its encoder knows, or angles that depend on other prompts, or answers by diffusion, or vLLM
            hashes no media. The message names the settings and the fix.
    """
    _check_experts(getattr(vllm_config, "aux_output_config", None))
    _check_pooling(vllm_config.model_config)
    _check_decoder(vllm_config.model_config)
    _check_positions(vllm_config.model_config)
    _check_angles(vllm_config.model_config)
    _check_media(vllm_config.model_config, caches=bool(vllm_config.cache_config.enable_prefix_caching))


def check_context(vllm_config: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that the engine can compute the rest of a prompt behind a loaded prefix.

    vLLM switches both prefix caching and chunked prefill off where its attention cannot do this, such as for
    multi-head latent attention on a CPU without AMX. It would still accept a loaded prefix, and compute wrong tokens.
    To be called when the layers have been checked: vLLM also does it for layers that read a prompt in both directions,
    and there these settings are no fix.

    Raises:
        ConfigError: both are off. The message names the settings and the fix.
    """
    caches = bool(vllm_config.cache_config.enable_prefix_caching)
    splits = bool(vllm_config.scheduler_config.enable_chunked_prefill)
    if caches or splits:
        return
    fix = (
        "set enable_prefix_caching or enable_chunked_prefill to True, or where vLLM switches both off for the model, "
        "serve it without tierkv, by removing kv_transfer_config"
    )
    if getattr(vllm_config.model_config, "use_mla", False):
        fix = (
            "this model has multi-head latent attention, for which vLLM switches both off on a CPU without AMX: serve "
            "it there without tierkv, by removing kv_transfer_config, or use a GPU or a CPU with AMX; where vLLM lets "
            "you, set enable_prefix_caching or enable_chunked_prefill to True"
        )
    raise ConfigError(
        "enable_prefix_caching = False and enable_chunked_prefill = False: this engine computes each prompt in one "
        f"pass, and nothing shows that it can start behind tokens that tierkv has loaded; {fix}"
    )


def _check_experts(outputs: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that an answer does not name the experts of each token.

    vLLM keeps these beside its own prefix cache, for tokens that it has computed. It accepts a loaded prefix, then
    misses them in the worker, and its engine ends.
    """
    if getattr(outputs, "enabled", False):
        raise ConfigError(
            "enable_return_routed_experts = True: vLLM knows the experts of tokens that it has computed, and none of "
            "tokens that tierkv has loaded; remove --enable-return-routed-experts, or serve without tierkv, by "
            "removing kv_transfer_config"
        )


def _check_decoder(model: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that the KV of a token depends on the tokens in front of it alone, and on no other input.

    With an encoder, it also depends on what the encoder read: a recording, for which there are no hashes.
    """
    if getattr(model, "is_encoder_decoder", False):
        raise ConfigError(
            "this model has an encoder beside its decoder (is_encoder_decoder = True), so its KV depends on more than "
            "tokens, and vLLM keeps no prefixes of it; serve it without tierkv, by removing kv_transfer_config"
        )
    if getattr(model, "is_diffusion", False):
        raise ConfigError(
            "this model answers by diffusion (it has a canvas_length), so a step may compute tokens without their KV, "
            "and nothing shows that its chunks are right; serve it without tierkv, by removing kv_transfer_config"
        )


def _check_positions(model: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that the positions of tokens do not depend on whether the encoder of videos runs.

    With pruned videos and M-RoPE, vLLM corrects the positions of a prompt by what its encoder returns. Behind a loaded
    video the encoder does not run, so all tokens there have other positions, and the answer has other tokens.
    """
    rate = getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None)
    if rate and getattr(model, "uses_mrope", False):
        raise ConfigError(
            f"video_pruning_rate = {rate}: vLLM corrects the positions of this model (M-RoPE) only where its encoder "
            "runs, and it does not run for a video that tierkv has loaded; remove --video-pruning-rate, or serve "
            "without tierkv, by removing kv_transfer_config"
        )


def _check_angles(model: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that the KV of a token does not depend on the length of the prompt.

    vLLM chooses the angles of rotary embeddings once. The transformers library chooses those of LongRoPE and of dynamic
    NTK in each step, by the largest position in it.
    """
    if not uses_transformers(model):
        return
    config = model.hf_text_config
    for rope in ropes_of(config):
        kind = rope.get("rope_type")
        limit = rope.get("original_max_position_embeddings", getattr(config, "max_position_embeddings", 0))
        if kind in {"longrope", "dynamic"} and model.max_model_len > int(limit):
            raise ConfigError(
                f"max_model_len = {model.max_model_len} with rope_type = {kind!r}, in the model of the transformers "
                f"library: its KV is another one in steps that reach beyond {limit} tokens; serve vLLM's own model "
                f"(--model-impl vllm), set --max-model-len to at most {limit}, or serve without tierkv, by removing "
                "kv_transfer_config"
            )


def _check_media(model: Any, *, caches: bool) -> None:  # noqa: ANN401 - (the same)
    """Check that vLLM hashes pictures and other media, which are a part of the hashes of blocks.

    It does not where it neither caches prefixes nor prepared media. It numbers them then, from 1 in each process, so
    the first picture of each server would have the KV of the others' first one.
    """
    media = getattr(model, "multimodal_config", None)
    if not caches and media is not None and getattr(media, "mm_processor_cache_gb", None) == 0:
        raise ConfigError(
            "enable_prefix_caching = False and mm_processor_cache_gb = 0: vLLM then numbers pictures and other media, "
            "and hashes none, so tierkv would load the KV of another picture; set enable_prefix_caching to True, or "
            "--mm-processor-cache-gb to more than 0"
        )


def check_role(transfer: Any) -> None:  # noqa: ANN401 - vLLM's, which has no types here
    """Check that the engine may both store and load.

    Args:
        transfer: vLLM's ``KVTransferConfig`` of this connector.

    Raises:
        ConfigError: the role is not ``kv_both``. The message names the setting and the fix.
    """
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role = "{transfer.kv_role}": tierkv stores and loads; write "kv_role": "kv_both" in '
            "--kv-transfer-config"
        )


def _check_pooling(model: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that an answer of a pooling model depends on no hidden states of the tokens in front of the last ones.

    With mean pooling, vLLM needs the hidden states of all tokens of a prompt in one pass. It accepts a loaded prefix,
    then raises in the worker, and its engine ends.
    """
    pooling = getattr(model, "pooler_config", None)
    if pooling is None or getattr(model, "is_chunked_prefill_supported", True):
        return
    kinds = (f"{name} = {getattr(pooling, name, None)!r}" for name in ("seq_pooling_type", "tok_pooling_type"))
    raise ConfigError(
        f"pooler_config with {', '.join(kinds)}: vLLM computes this from all tokens of a prompt in one pass, so it "
        "cannot start behind tokens that tierkv has loaded; serve this model without tierkv, by removing "
        "kv_transfer_config"
    )


def check_cache(num_groups: int) -> None:
    """Check that the model has a KV cache. vLLM checks it for the spec.

    Args:
        num_groups: its KV cache groups.

    Raises:
        ConfigError: it has none. The message names the setting and the fix.
    """
    if not num_groups:
        raise ConfigError(
            "kv_transfer_config: this model has no KV cache, as an encoder for embeddings has none, so there is "
            "nothing to store; remove kv_transfer_config"
        )


def check_nodes(vllm_config: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that all workers of the engine are on one machine.

    Raises:
        ConfigError: they are not. The message names the setting and the fix.
    """
    parallel = vllm_config.parallel_config
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ConfigError(
            f"nnodes = {parallel.nnodes}: tierkv shares its host tier with the workers through the memory of one "
            "machine; run one engine on each and let them share a tier instead"
        )


def check_speculation(vllm_config: Any) -> None:  # noqa: ANN401 - (the same)
    """Check that the KV cache of a draft model can be stored beside that of the model.

    The layers of the draft are layers of a KV cache group like others. Their KV decides which tokens are proposed. The
    model checks each proposed token, so it takes the same tokens with any draft.

    Raises:
        ConfigError: the draft has a KV cache, and the method is not a tested one. The message names it and the fix.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return
    tested = ", ".join(repr(method) for method in DRAFTS)
    if speculative.method not in DRAFTS:
        raise ConfigError(
            f"speculative_config.method = {speculative.method!r}: nothing shows that the KV cache of this draft can be "
            f"stored beside that of the model; use one of {tested} or 'ngram', or remove speculative_config"
        )
    if speculative.parallel_drafting:
        raise ConfigError(
            "speculative_config.parallel_drafting = True: nothing shows that the KV cache of a draft that proposes "
            "all tokens at once can be stored; set it to False, or remove speculative_config"
        )


def warn_of_lost_stores(vllm_config: Any, stack: StackConfig) -> bool:  # noqa: ANN401 - (the same)
    """Log a warning if chunks that only the host tier holds are lost at each normal stop; return whether they are.

    vLLM ends its engine at once with ``--shutdown-timeout 0``, its default. A tier with ``write = "back"`` gets its
    chunks when they leave the host tier, or when the stack is closed.
    """
    names = [tier.name for tier in stack.tiers if tier.write == "back"]
    if not names or getattr(vllm_config, "shutdown_timeout", None) != 0:
        return False
    _log.warning(
        'shutdown_timeout = 0, and write = "back" in tier %s: vLLM then ends its engine at once when it stops, and '
        "chunks that only the host tier holds are lost. Start vLLM with --shutdown-timeout 30 (seconds), or set "
        'write = "through"',
        " and ".join(repr(name) for name in names),
    )
    return True


def let_failed_loads_recompute(vllm_config: Any = None) -> None:  # noqa: ANN401 - (the same)
    """Set ``kv_load_failure_policy`` to "recompute" where vLLM's scheduler reads it.

    With "fail", vLLM's default, a chunk that cannot be loaded would fail its request. The scheduler reads the policy of
    its own configuration, after it has created its connector. A connector inside a ``MultiConnector`` gets a copy, so
    the policy is also set in the configuration of each connector that is creating this one.

    Args:
        vllm_config: vLLM's configuration, where it is known.
    """
    known = [] if vllm_config is None else [vllm_config.kv_transfer_config]
    creating = [connector._kv_transfer_config for connector in calling_connectors()]  # noqa: SLF001 - there is no public name
    for transfer in known + creating:
        if transfer.kv_load_failure_policy != "recompute":
            _log.info(
                "kv_load_failure_policy of %s is set to 'recompute': chunks that cannot be loaded are computed",
                transfer.kv_connector,
            )
            transfer.kv_load_failure_policy = "recompute"


def calling_connectors() -> Iterator[Any]:
    """Connectors of vLLM that are calling tierkv now, or are creating one that does; the nearest first.

    A connector does not hand itself to what it creates or calls, so it is found on the stack of calls.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: PLC0415 - vLLM is optional

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, KVConnectorBase_V1):
            yield caller
        frame = frame.f_back
