"""Facts about requests that vLLM does not pass on to the manager of an offloading spec, and the keys that follow.

vLLM's ``ReqContext`` does not tell that the input of a request is streamed, nor which adapter it has. But every
connector of vLLM gets each new request. So the manager puts a method of its own into the one ``OffloadingConnector``
object that creates it, as :mod:`.failed_loads` does. No class of vLLM is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from tierkv.integrations.vllm.connector.requests import is_served, view_of
from tierkv.integrations.vllm.engine_checks import calling_connectors
from tierkv.integrations.vllm.identity.adapters import Adapters
from tierkv.scheduler.requests.record import scope_of
from tierkv.types.keys import Key


def receive_requests(receive: Callable[[Any], None]) -> bool:
    """Have the calling connector name each new request. Call it while the connector creates its manager.

    Args:
        receive: gets a request before the manager gets it. Raises nothing.

    Returns:
        Whether a connector does. False where no connector of vLLM is calling.
    """
    connector = next(calling_connectors(), None)
    if connector is None:
        return False
    begin = connector.on_new_request

    def on_new_request(request: Any) -> None:  # noqa: ANN401 - vLLM's, which has no types here
        receive(request)
        begin(request)

    connector.on_new_request = on_new_request
    return True


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Keys of the chunks of a request: vLLM's own behind a scope, which names adapter, its content, and new weights."""

    scope: bytes = b""
    """Empty without an adapter, with the weights of the folder."""

    def stored(self, keys: Iterable[Any]) -> list[Key]:
        """Keys of the stack."""
        scope = self.scope
        return cast("list[Key]", [scope + key for key in keys] if scope else list(keys))

    def named(self, keys: Iterable[Key]) -> list[Any]:
        """Keys of vLLM."""
        start = len(self.scope)
        return [key[start:] for key in keys] if start else list(keys)


PLAIN_KEYS = RequestKeys()


@dataclass(slots=True)
class _Named:
    """Request of vLLM, while it is open."""

    request: Any
    """VLLM's request."""
    preemptions: int = 0
    """Preemptions that vLLM has reported."""
    is_checked: bool = False
    """Whether :meth:`NamedRequests.check_own_hit` was called for it."""
    prefilled: int = 0
    """Prompt tokens that it has computed, while it is in prefill."""


class NamedRequests:
    """Open requests, as vLLM's connector names them. Scheduler's thread."""

    def __init__(self) -> None:
        self.weights = ""
        """Name of the weights in memory since a reset; empty: those of the folder."""
        self._arriving: Any = None
        self._adapters = Adapters()
        self._named: dict[str, _Named] = {}
        self._unnamed: set[str] = set()
        self._being_preempted: set[str] = set()
        self._prefilling: set[str] = set()  # scheduled, with prompt tokens to compute
        self._prompt_tokens = 0  # computed since the latest end of a step, by requests that have ended

    def receive(self, request: Any) -> None:  # noqa: ANN401 - (the same)
        """Remember a request, which the manager gets next."""
        self._arriving = request

    def take(self, request_id: str) -> RequestKeys | None:
        """Keys of a request that arrives at the manager; None if it must be served without tierkv.

        That is one that is not served (:func:`~.is_served`), whose adapter has changed since it was loaded, or that no
        connector has named: it may be any of these. vLLM does not name a request that it ends before its beginning.
        """
        request, self._arriving = self._arriving, None
        if request is None or request.request_id != request_id:
            self._unnamed.add(request_id)
            return None
        if not is_served(request):
            return None
        self._named[request_id] = _Named(request, request.num_preemptions)
        adapter = "" if request.lora_request is None else self._adapters.digest_of(request.lora_request)
        if adapter is None:
            return None
        view = view_of(request, adapter + self.weights)
        return PLAIN_KEYS if view is request else RequestKeys(scope_of(view))

    def take_unnamed(self, request_id: str) -> bool:
        """Whether no connector has named the request; True once for each."""
        if request_id not in self._unnamed:
            return False
        self._unnamed.discard(request_id)
        return True

    def check_own_hit(self, request_id: str) -> None:
        """Check a request with an adapter that is about to store for the first time.

        Raises:
            EngineProtocolError: vLLM's own cache had a part of its prompt, perhaps of another adapter.
        """
        one = self._named.get(request_id)
        if one is None or one.is_checked:
            return
        one.is_checked = True
        stats = one.request.prefill_stats  # which vLLM takes away at the first token
        if stats is None or stats.num_local_cached_tokens:
            self._adapters.check_own_hit(one.request.lora_request)

    def names(self) -> set[str]:
        """Ids of all of them."""
        return set(self._named)

    def begun(self) -> set[str]:
        """Requests that hold computed or loaded tokens."""
        return {name for name, one in self._named.items() if one.request.num_computed_tokens > 0}

    def is_being_preempted(self, request_id: str) -> bool:
        """Whether the request was preempted in this step, which vLLM tells at its end."""
        one = self._named.get(request_id)
        if one is None or one.request.num_preemptions == one.preemptions:
            return False
        self._being_preempted.add(request_id)
        return True

    def end_step(self, started: Iterable[str], preempted: Iterable[str]) -> int:
        """Note the preemptions that vLLM tells at the end of a step. Returns the prompt tokens computed since the last.

        vLLM counts the tokens of a step as computed behind this call. Those of a request that was preempted do not
        count from then on: it has other tokens, perhaps loaded ones, when it is scheduled again.
        """
        for request_id in self._being_preempted.union(preempted):
            if (one := self._named.get(request_id)) is not None:
                one.preemptions = one.request.num_preemptions
            self._prefilling.discard(request_id)
        self._being_preempted.clear()
        for request_id in list(self._prefilling) if self._prefilling else ():
            self._count_prefill(request_id)
        for request_id in started:
            if (one := self._named.get(request_id)) is not None:
                one.prefilled = one.request.num_computed_tokens
                self._prefilling.add(request_id)
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        return tokens

    def _count_prefill(self, request_id: str) -> None:
        """Count the prompt tokens of a request that were computed since the previous call for it."""
        one = self._named[request_id]
        computed = min(one.request.num_computed_tokens, one.request.num_prompt_tokens)
        self._prompt_tokens += max(0, computed - one.prefilled)
        one.prefilled = computed
        if computed == one.request.num_prompt_tokens:
            self._prefilling.discard(request_id)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        if request_id in self._prefilling:
            self._count_prefill(request_id)
            self._prefilling.discard(request_id)
        one = self._named.pop(request_id, None)
        if one is not None and one.request.lora_request is not None and one.request.num_computed_tokens:
            self._adapters.note_served(one.request.lora_request)
        self._unnamed.discard(request_id)
