"""Calls into plugin code: which exceptions count as a plugin's fault, and what a hook may return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pluggy

from tierkv.errors import PluginError, TierKVError
from tierkv.plugins.origins import Origin
from tierkv.plugins.validation import check_plugin_value

T = TypeVar("T")

PLUGIN_FAULTS = (Exception, SystemExit)
"""Exceptions that plugin code may raise at import or in a hook. The plugin is then named and left out."""


def registered_values(hook: pluggy.HookCaller, kind: type[T]) -> list[T]:
    """Call a registering hook of one plugin and check the values that it returns.

    Raises:
        PluginError: the hook returned something else than an iterable of ``kind``, or a value that contradicts itself.
    """
    answers = hook()
    implementations = sum(1 for impl in hook.get_hookimpls() if not (impl.wrapper or impl.hookwrapper))
    if len(answers) < implementations:  # pluggy omits None
        raise PluginError(f"{hook.name} returned None; return a list of {kind.__name__}")
    values: list[T] = []
    for answer in answers:
        if not isinstance(answer, Iterable):
            raise PluginError(f"{hook.name} returned a {type(answer).__name__}; return a list of {kind.__name__}")
        for value in answer:
            if not isinstance(value, kind):
                raise PluginError(f"{hook.name} gave a {type(value).__name__} ({value!r:.80}); give {kind.__name__}")
            check_plugin_value(value)
            values.append(value)
    return values


def open_value(
    what: str, origin: Origin, make: Callable[[], T], *, tier: str | None = None, error: type[TierKVError] = PluginError
) -> T:
    """Open a backend, codec or policy of a plugin.

    Args:
        what: kind and name of the opened object, for messages.
        origin: the plugin, for messages.
        make: the plugin's ``open``, with its arguments bound.
        tier: name of the tier that the object is opened for, or None.
        error: class of the error raised in place of an exception that is no :class:`TierKVError`.

    Raises:
        TierKVError: raised by the plugin itself, passed on with the tier's name; or an ``error`` that names the plugin.
    """
    try:
        return make()
    except TierKVError as fault:
        fault.tier = fault.tier or tier
        raise
    except KeyboardInterrupt:  # the user's
        raise
    except BaseException as fault:  # also a cancelled task, or a panic of compiled code
        place = "" if tier is None else f"tier {tier!r}: "
        text = f"{place}{what} of {origin} cannot be opened: {type(fault).__name__}: {fault}".removesuffix(": ")
        raise error(text, tier=tier) from fault
