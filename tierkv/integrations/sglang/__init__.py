"""Adapter to SGLang: a storage backend of its hierarchical cache (HiCache) over the lower tiers of a stack.

SGLang keeps its own pool of pages in host memory, and calls a *storage backend* with page hashes and positions in that
pool. The adapter stores and loads these pages. Its stack has a small host tier, as staging for pages under way.

Four nouns. ``TierKVHiCache`` is the class that SGLang loads. ``PoolPages`` copies pages between a pool and slots. The
``EngineSpec`` of :mod:`~tierkv.integrations.sglang.identity` names everything that makes pages interchangeable. A
``PageStore`` turns a stack, which never waits, into calls that wait for a bounded time.

Flow of a backup: ask which pages the tiers lack, copy these into slots, seal them, step the stack until a lower tier
has acknowledged each one. Flow of a prefetch: look the pages up until they are staged, copy them into the pool.

Invariants:

- The result of a page is True only if a lower tier acknowledged it, or if verified bytes were copied into the pool.
- A call ends within its timeout, whatever the tiers do; a page without an answer by then is False.
- Pages of another model revision, epoch, dtype, pool layout, page size or rank are never found.
- Calls may come from several threads of SGLang. A lock protects each step; no call holds it while it waits or copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.integrations.first_use import load

if TYPE_CHECKING:
    from tierkv.integrations.sglang.hicache import TierKVHiCache as TierKVHiCache

__all__ = ["TierKVHiCache"]

_MODULES = {"TierKVHiCache": "hicache"}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    return load(__name__, _MODULES, name)
