"""SGLang's storage backend: the class that ``--hicache-storage-backend dynamic`` loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from tierkv.errors import ConfigError, TierKVError
from tierkv.integrations.sglang.identity import engine_spec
from tierkv.integrations.sglang.options import PROBE_TIMEOUT_S, TIMEOUT_S, read_seconds, read_stack
from tierkv.integrations.sglang.pages import HostPool, PoolPages
from tierkv.integrations.sglang.store import PageStore
from tierkv.stack.opening import open_staged_stack

_log = logging.getLogger(__name__)

_KV = str(PoolName.KV)
_T = TypeVar("_T")


class TierKVHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Pages of SGLang's host pools in the lower tiers of a stack. Any thread of SGLang.

    A failing tier is a page that is not found, or not stored: no method raises once the stack is open.

    Args:
        storage_config: SGLang's configuration; ``extra_config`` has the options of the adapter: ``stack``,
            ``revision``, ``timeout_s``, ``probe_timeout_s``.
        arguments: further arguments of SGLang; unused.

    Raises:
        ConfigError: an option is missing or wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, arguments: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - SGLang passes it
        self._storage = storage_config
        self._options = dict(storage_config.extra_config or {})
        self._config = read_stack(self._options)
        self._timeout_s = read_seconds(self._options, "timeout_s", TIMEOUT_S)
        self._probe_timeout_s = read_seconds(self._options, "probe_timeout_s", PROBE_TIMEOUT_S)
        self._pools: dict[str, HostPool] = {}
        self._pages: dict[str, PoolPages] = {}
        self._groups: dict[str, int] = {}
        self._store: PageStore | None = None
        self._logged: set[str] = set()

    # -- pools -------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Take the pool that holds the KV."""
        self.mem_pool_host = mem_pool_host
        self._pools[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """Take a pool of a hybrid model. Without effect once the stack is open."""
        if self._store is None:
            self._pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """Open the stack, for the pools registered so far. Blocks until durable tiers have listed what they hold.

        Raises:
            ConfigError: a pool or the configuration cannot be served; says why.
            BackendError: a tier cannot be opened.
        """
        if self._store is not None:
            return
        if _KV not in self._pools:
            raise ConfigError("SGLang registered no host pool for KV: start it with --enable-hierarchical-cache")
        names = [_KV, *(name for name in self._pools if name != _KV)]
        pages = {name: PoolPages(self._pools[name], self._first_page(self._pools[name])) for name in names}
        pools = [(name, self._pools[name], pages[name]) for name in names]
        spec = engine_spec(self._config, self._storage, pools, self._options)
        stack = open_staged_stack(self._config, spec)
        self._pages, self._groups = pages, {name: index for index, name in enumerate(names)}
        self._store = PageStore(
            stack,
            pages[_KV].page_size,
            timeout_s=self._timeout_s,
            probe_timeout_s=self._probe_timeout_s,
            queue_bytes_max=min(tier.queue_bytes_max for tier in self._config.tiers),
        )

    @staticmethod
    def _first_page(pool: HostPool) -> torch.Tensor:
        return torch.arange(pool.page_size, dtype=torch.int64)

    # -- pages of the KV pool ----------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:  # noqa: ARG002 - SGLang passes it
        """Return the number of leading pages that a tier holds, as far as the tiers answer in time."""
        return self._call(lambda store: store.count_prefix([_hash(key) for key in keys]), 0)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002 - SGLang passes it
    ) -> list[bool]:
        """Load pages into the pool. Returns, for each, whether verified bytes were copied."""
        return self._move(_KV, keys, host_indices, PageStore.load)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002 - SGLang passes it
    ) -> list[bool]:
        """Store pages of the pool. Returns, for each, whether a lower tier holds it."""
        if not self._storage.is_storage_writer:  # another rank writes the same page
            return [True] * len(keys)
        return self._move(_KV, keys, host_indices, PageStore.store)

    def exists(self, key: str) -> bool:
        """Whether a tier holds the page."""
        return self.batch_exists([key]) > 0

    # -- pages of several pools --------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that every pool can serve, and all lengths at which a prefix may end."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {_KV: kv_pages} if kv_pages else {}
        ends = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            present = self._find(str(transfer.name), keys[:kv_pages])
            allowed = _ends(present, transfer)
            if allowed:
                hits[str(transfer.name)] = allowed[-1]
            ends = [end for end in ends if end in set(allowed)]
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002 - SGLang passes it
    ) -> dict[str, list[bool]]:
        """Load pages into several pools, as :meth:`batch_get_v1` does."""
        return {t.name: self._move(str(t.name), t.keys or [], t.host_indices, PageStore.load) for t in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002 - SGLang passes it
    ) -> dict[str, list[bool]]:
        """Store pages of several pools, as :meth:`batch_set_v1` does."""
        return {t.name: self._move(str(t.name), t.keys or [], t.host_indices, PageStore.store) for t in transfers}

    # -- calls that pass copies: read_stack() refuses a configuration that leads to them -----------------------------

    def get(self, *_args: object, **_kwargs: object) -> None:
        """Return None: pages are loaded by position only."""

    def batch_get(self, keys: list[str], *_args: object, **_kwargs: object) -> list[None]:
        """Return None for each page: pages are loaded by position only."""
        return [None] * len(keys)

    def set(self, *_args: object, **_kwargs: object) -> bool:
        """Return False: pages are stored by position only."""
        return False

    def batch_set(self, *_args: object, **_kwargs: object) -> bool:
        """Return False: pages are stored by position only."""
        return False

    # -- the whole ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete the pages of every tier; a shared or read-only tier keeps all of them, and an error is logged."""
        self._call(PageStore.clear, None)

    def close(self) -> None:
        """Write what is pending, and close the stack. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close(self._timeout_s)

    def _find(self, pool: str, keys: list[str]) -> list[bool]:
        group = self._groups.get(pool)
        if group is None or not keys:
            return [False] * len(keys)
        return self._call(lambda store: store.find([_hash(key) for key in keys], group), [False] * len(keys))

    def _move(
        self, pool: str, keys: list[str], indices: Sequence[int] | torch.Tensor | None, move: Callable[..., list[bool]]
    ) -> list[bool]:
        nothing = [False] * len(keys)
        if pool not in self._groups or indices is None:
            return nothing

        def call(store: PageStore) -> list[bool]:
            pages = self._pages[pool].locate(indices, len(keys))
            if pages is None:
                return nothing
            return move(store, [_hash(key) for key in keys], pages, self._groups[pool])

        return self._call(call, nothing)

    def _call(self, function: Callable[[PageStore], _T], otherwise: _T) -> _T:
        """Call with the open store. Without one, or on an error of tierkv, the answer is ``otherwise``."""
        store = self._store
        if store is None:
            return otherwise
        try:
            return function(store)
        except TierKVError as error:
            if type(error).__name__ not in self._logged:
                self._logged.add(type(error).__name__)
                _log.error("SGLang goes on without tierkv for this call; further such errors are silent: %s", error)
            return otherwise


def _hash(key: str) -> bytes:
    """Return the bytes of a page hash. SGLang's hashes are hexadecimal; other names of pages stay as they are."""
    try:
        return bytes.fromhex(key)
    except ValueError:
        return key.encode()


def _ends(present: Sequence[bool], transfer: PoolTransfer) -> list[int]:
    """Lengths at which a prefix may end, as far as one pool is concerned; none for a policy that is not known."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        whole = present.index(False) if False in present else len(present)
        return list(range(1, whole + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        return [end for end in range(1, len(present) + 1) if all(present[max(0, end - trailing) : end])]
    return []
