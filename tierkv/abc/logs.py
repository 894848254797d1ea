"""Log lines of plugins, with the fields that programs read: the event and the tier.

::

    logger = plugin_logger("tierkv_disk")
    logger.warning("%s cannot be read: %s", path, error)

becomes ``/kv/a cannot be read: ...: event=plugin_note tier=disk``. Both fields are attributes of the record, too. The
framework states the tier around each call of a backend, so no plugin passes it on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

EVENT = "plugin_note"
"""Name of the event of all such lines."""

_TIER: ContextVar[str] = ContextVar("tierkv_tier", default="")


@contextmanager
def lines_of_tier(tier: str) -> Iterator[None]:
    """State the tier of the lines that are written within. For the framework."""
    token = _TIER.set(tier)
    try:
        yield
    finally:
        _TIER.reset(token)


class _PluginLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the fields to each line."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return the text with the fields, and the record's attributes."""
        tier = _TIER.get().replace("%", "_")  # the text is a format
        fields = f"event={EVENT} tier={tier}" if tier else f"event={EVENT}"
        return f"{msg}: {fields}", {**kwargs, "extra": {"event": EVENT, "tier": tier, **(kwargs.get("extra") or {})}}


def plugin_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return the logger of a plugin. name: that of its package."""
    return _PluginLogger(logging.getLogger(name), {})
