"""VLLM's requests as tierkv reads them: they are taken as they are, but for those with an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierkv.types.engine import Request


def view_of(request: Any) -> Request:  # noqa: ANN401 - vLLM's Request, which has no types here
    """The request itself, which has all that tierkv reads; with an adapter, a view that also names it."""
    plain: Request = request
    return plain if request.lora_request is None else AdapterRequest(request)


def is_served(request: Any) -> bool:  # noqa: ANN401 - (the same)
    """Whether tierkv has anything to do with it.

    Sessions to which input is streamed are left out: their tokens and hashes are taken back when more input comes.
    """
    return not request.resumable


class AdapterRequest:
    """A request that uses a LoRA adapter, which vLLM names at another place. Nothing is copied."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:  # noqa: ANN401 - (the same)
        self._request = request

    @property
    def request_id(self) -> str:
        """See :class:`Request`."""
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        """See :class:`Request`."""
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """See :class:`Request`."""
        return int(self._request.num_prompt_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """See :class:`Request`."""
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """See :class:`Request`."""
        params: Mapping[str, Any] | None = self._request.kv_transfer_params
        return params

    @property
    def all_token_ids(self) -> Sequence[int]:
        """See :class:`TokenizedRequest`."""
        ids: Sequence[int] = self._request.all_token_ids
        return ids

    @property
    def cache_salt(self) -> str | None:
        """See :class:`ScopedRequest`."""
        salt: str | None = self._request.cache_salt
        return salt

    @property
    def lora_name(self) -> str:
        """See :class:`ScopedRequest`."""
        return str(self._request.lora_request.lora_name)

    @property
    def lora_id(self) -> int:
        """See :class:`TokenizedRequest`."""
        return int(self._request.lora_request.lora_int_id)
