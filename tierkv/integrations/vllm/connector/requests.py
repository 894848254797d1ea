"""Views of vLLM's requests. Requests without an adapter are used unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.types.engine import Request


def view_of(request: Any, adapter_digest: str = "") -> Request:  # noqa: ANN401 - vLLM's Request, which has no types here
    """Return the request itself, or for a request with an adapter, a view that also names the adapter.

    Args:
        request: vLLM's request.
        adapter_digest: digest of the adapter's files, needed when the request is registered.
    """
    plain: Request = request
    return plain if request.lora_request is None else AdapterRequest(request, adapter_digest)


def is_served(request: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether tierkv stores and loads for a request.

    Sessions with streamed input are excluded, because their tokens and hashes are revoked when more input arrives.
    """
    return not request.resumable


class AdapterRequest:
    """View of a request with a LoRA adapter, which vLLM names in another attribute. Copies nothing."""

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
    def lora_name(self) -> str:
        """Name of the adapter."""
        return str(self._request.lora_request.lora_name)

    @property
    def lora_id(self) -> int:
        """Number of the adapter."""
        return int(self._request.lora_request.lora_int_id)
