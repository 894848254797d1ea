"""Log lines of plugins, with the fields that programs read: the event and the tier.

::

    logger = plugin_logger("tierkv_disk")
    logger.warning("%s cannot be read: %s", path, error)

becomes ``/kv/a cannot be read: ...: event=plugin_note tier=disk suppressed=0``. The fields are attributes of the
record, too. The framework states the tier around each call of a backend, so no plugin passes it on. It limits the rate
of these lines as that of its own: lines of one tier with one format are one kind.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

EVENT = "plugin_note"
"""Name of the event of all such lines."""

Write: TypeAlias = Callable[[Mapping[str, object]], None]
"""Writes a line with further fields; on any thread."""

Limit: TypeAlias = Callable[[str, str, Write], None]
"""(tier, format of the line, write): calls ``write`` now, later, or never."""

_CALL: ContextVar[tuple[str, Limit | None]] = ContextVar("tierkv_call", default=("", None))


@contextmanager
def lines_of_tier(tier: str, limit: Limit | None = None) -> Iterator[None]:
    """State the tier of the lines that are written within, and the limit of their rate. For the framework."""
    token = _CALL.set((tier, limit))
    try:
        yield
    finally:
        _CALL.reset(token)


class _PluginLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the fields to each line, and limits their rate."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 - as the method that it replaces
        """Write a line, unless the limit holds it back."""
        if not self.isEnabledFor(level):
            return
        tier, limit = _CALL.get()
        if kwargs.get("exc_info") is True:  # it may be written later
            kwargs["exc_info"] = sys.exc_info()
        kwargs["extra"] = {"event": EVENT, "tier": tier, **(kwargs.get("extra") or {})}

        def write(fields: Mapping[str, object]) -> None:
            text, more = self.process(msg, {**kwargs, "extra": {**kwargs["extra"], **fields}})
            self.logger.log(level, text, *args, **more)

        if limit is None:
            write({})
        else:
            limit(tier, str(msg), write)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Return the text with the fields, and the record's attributes."""
        shown = ((name, kwargs["extra"].get(name, "")) for name in ("event", "tier", "seconds_ago", "suppressed"))
        fields = " ".join(f"{name}={value}" for name, value in shown if value != "")
        return f"{msg}: {fields.replace('%', '_')}", kwargs  # the text is a format


def plugin_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Return the logger of a plugin. name: that of its package."""
    return _PluginLogger(logging.getLogger(name), {})
