"""Views of vLLM's requests. Requests for the weights of the folder alone, without an adapter, are used unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierkv.types.engine import Request


def view_of(request: Any, weights: str = "") -> Request:  # noqa: ANN401 - vLLM's Request, which has no types here
    """Return the request itself, or for a request with an adapter or other weights, a view that also names these.

    Args:
        request: vLLM's request.
        weights: digest of the adapter's files, and the name of other weights than those of the folder; needed when the
            request is registered.
    """
    plain: Request = request
    return plain if request.lora_request is None and not weights else ScopedView(request, weights)


def described_view_of(request: Any, weights: str = "") -> Request:  # noqa: ANN401 - (the same)
    """Return what :func:`view_of` does, or for a request whose hashes have more than tokens, a view that tells what."""
    has_more = request.mm_features or request.cache_salt or request.prompt_embeds is not None
    return ScopedView(request, weights) if has_more else view_of(request, weights)


def is_served(request: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether tierkv stores and loads for a request.

    Sessions with streamed input are excluded, because their tokens and hashes are revoked when more input arrives. So
    are prompts in which media share their places, as the frames of a video and its sound do where a model takes them
    in turns (``use_audio_in_video``). vLLM's hash of a block there has the first of them only, so blocks of another
    sound, or of other frames, have equal hashes.
    """
    return not request.resumable and not _media_share_places(request.mm_features)


def _media_share_places(features: Iterable[Any]) -> bool:
    """Whether media of a prompt overlap; vLLM names them in the order of their first token."""
    end = 0
    for feature in features:
        place = feature.mm_position
        if place.offset < end:
            return True
        end = place.offset + place.length
    return False


class ScopedView:
    """View of a request with what vLLM names elsewhere: an adapter, other weights, what hashes have beside tokens."""

    __slots__ = ("_request", "adapter_digest")

    def __init__(self, request: Any, adapter_digest: str = "") -> None:  # noqa: ANN401 - (the same)
        self._request = request
        self.adapter_digest = adapter_digest

    @property
    def request_id(self) -> str:
        """Id as vLLM gave it, unique among live requests."""
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and generated tokens."""
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, without generated tokens."""
        return int(self._request.num_prompt_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of the tokens."""
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters attached by the user."""
        params: Mapping[str, Any] | None = self._request.kv_transfer_params
        return params

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt tokens and generated tokens."""
        ids: Sequence[int] = self._request.all_token_ids
        return ids

    @property
    def cache_salt(self) -> str | None:
        """Salt by which vLLM separates tenants; None: shared."""
        salt: str | None = self._request.cache_salt
        return salt

    @property
    def lora_name(self) -> str | None:
        """Name of the adapter, or None."""
        adapter = self._request.lora_request
        return None if adapter is None else str(adapter.lora_name)

    @property
    def lora_id(self) -> int | None:
        """Number of the adapter, or None."""
        adapter = self._request.lora_request
        return None if adapter is None else int(adapter.lora_int_id)

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """Headers that name the trace of the request."""
        headers: Mapping[str, str] | None = self._request.trace_headers
        return headers

    def extra_keys(self, start: int, stop: int) -> tuple[Any, ...] | None:
        """Values in the hash of a block beside its tokens, in the form of vLLM's events: pictures and their places."""
        from vllm.v1.core.kv_cache_utils import (  # noqa: PLC0415 - vLLM is optional
            generate_block_hash_extra_keys,
            to_event_extra_keys,
        )

        keys, _ = generate_block_hash_extra_keys(self._request, start, stop, 0)
        (found,) = to_event_extra_keys([keys]) or (None,)
        return found
