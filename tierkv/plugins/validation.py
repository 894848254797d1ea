"""Checks of the values that plugins register. Later code relies on them and does not repeat them."""

from __future__ import annotations

import dataclasses
import re

from tierkv.abc.at_rest import AtRest
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.plugin import BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import PluginError

NAME_CHARS_MAX = 32
CODEC_NAME_CHARS_MAX = 16
"""Size of the codec name field in a frame's header, in bytes."""
SPARE_SHARE_MAX = 0.25
"""A tier evicts no larger share of its capacity at once."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def check_plugin_value(plugin: object) -> None:
    """Check a :class:`BackendPlugin`, :class:`CodecPlugin` or :class:`PolicyPlugin` for contradictions.

    Values of other types pass.

    Raises:
        PluginError: names the registered value, the field, and what is allowed.
    """
    if isinstance(plugin, BackendPlugin):
        _check_name("backend", plugin.name, NAME_CHARS_MAX)
        _check_callable("backend", plugin.name, "open", plugin.open)
        if plugin.check is not None:
            _check_callable("backend", plugin.name, "check", plugin.check)
        if plugin.at_rest is not None:
            _check_at_rest(plugin.name, plugin.at_rest)
        _check_options("backend", plugin.name, plugin.options)
        _check_capabilities(plugin.name, plugin.capabilities)
    elif isinstance(plugin, CodecPlugin):
        _check_name("codec", plugin.name, CODEC_NAME_CHARS_MAX)
        _check_callable("codec", plugin.name, "open", plugin.open)
        if plugin.check is not None:
            _check_callable("codec", plugin.name, "check", plugin.check)
        _check_options("codec", plugin.name, plugin.options)
    elif isinstance(plugin, PolicyPlugin):
        _check_name("policy", plugin.name, NAME_CHARS_MAX)
        _check_callable("policy", plugin.name, "open", plugin.open)


def _check_name(kind: str, name: object, chars_max: int) -> None:
    if not (isinstance(name, str) and len(name) <= chars_max and _NAME.fullmatch(name)):
        raise PluginError(
            f"{kind} name {name!r:.80} is not allowed: at most {chars_max} lower-case letters, digits, - and _, "
            f"a letter first"
        )


def _check_callable(kind: str, name: str, what: str, value: object) -> None:
    if not callable(value):
        raise PluginError(f"{kind} {name!r}: {what} must be callable, not {value!r:.80}")


def _check_at_rest(name: str, at_rest: object) -> None:
    if not isinstance(at_rest, AtRest):
        raise PluginError(f"backend {name!r}: at_rest must be an AtRest, not {at_rest!r:.80}")
    _check_callable("backend", name, "at_rest.namespaces", at_rest.namespaces)
    for ability in ("open_reader", "remove_namespace", "give_up_room", "finish_removals"):
        if getattr(at_rest, ability) is not None:
            _check_callable("backend", name, f"at_rest.{ability}", getattr(at_rest, ability))


def _check_options(kind: str, name: str, options: object) -> None:
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise PluginError(f"{kind} {name!r}: options must be a dataclass, not {options!r:.80}")


def _check_capabilities(name: str, capabilities: object) -> None:
    if not isinstance(capabilities, Capabilities):
        raise PluginError(f"backend {name!r}: capabilities must be a Capabilities, not {capabilities!r:.80}")
    if capabilities.authoritative_index and not capabilities.scan:
        raise PluginError(f"backend {name!r}: authoritative_index needs scan")
    if capabilities.authoritative_index and capabilities.shared:
        raise PluginError(f"backend {name!r}: authoritative_index excludes shared")
    for count in ("preferred_batch", "preferred_concurrency", "alignment"):
        if getattr(capabilities, count) < 1:
            raise PluginError(f"backend {name!r}: {count} must be at least 1, not {getattr(capabilities, count)!r}")
    for count in ("preferred_write_bytes", "preferred_read_bytes"):
        wished = getattr(capabilities, count)
        if wished is not None and wished < 1:
            raise PluginError(f"backend {name!r}: {count} must be at least 1 or None, not {wished!r}")
    if not 0.0 <= capabilities.spare_share <= SPARE_SHARE_MAX:
        raise PluginError(
            f"backend {name!r}: spare_share must be 0 to {SPARE_SHARE_MAX}, not {capabilities.spare_share!r}"
        )
    if capabilities.alignment & (capabilities.alignment - 1):
        raise PluginError(f"backend {name!r}: alignment must be a power of two, not {capabilities.alignment}")
