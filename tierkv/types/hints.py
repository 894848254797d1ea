"""Hints of a request about its chunks: ``kv_transfer_params["tierkv"]``. Values are checked; wrong ones are ignored.

Every key is optional. A hint never makes an answer wrong: in the worst case a chunk is computed again.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

HINTS = "tierkv"
"""Key of ``kv_transfer_params`` that holds the hints."""

PRIORITY_MIN, PRIORITY_MAX = -100, 100
SESSION_CHARS_MAX = 256
TIER_NAMES_MAX = 64
_SHOWN_CHARS_MAX = 80


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints of one request, as read. :data:`ALLOWED` lists the values that each key allows."""

    load_tiers: frozenset[str] | None = None
    """Tiers that a hit may come from; name ``host`` to include the host tier. A chunk is a hit if one of these tiers
    has it. No other tier is probed or read for this request. Bytes are copied from the host tier where it has the
    chunk.
    Empty: nothing is loaded. Default: all tiers."""
    max_load_tokens: int | None = None
    """Largest number of tokens to load, beyond the tokens in the engine's own cache. 0: the tiers are not asked.
    Default: no bound."""
    max_offload_tokens: int | None = None
    """Only chunks that end within the first ``max_offload_tokens`` tokens are stored. Default: no bound."""
    store: frozenset[str] | None = None
    """``false``: nothing is stored. A list: stored chunks are written to these tiers only. They pass through the host
    tier, named or not. Empty: nothing is stored. A chunk that is already in the host tier keeps its retention.
    Default: ``true``, all tiers."""
    priority: int = 0
    """Value of the request's chunks compared with others; higher is more. For policies. Default: 0."""
    ttl_s: float | None = None
    """Seconds after which a chunk stored under this hint counts as absent and is deleted. A later use with a ``ttl_s``
    may prolong the time, never shorten it. A use without one removes the limit. Such chunks are not written to tiers
    that other processes share. The time is lost at a restart. Default: no limit."""
    retain: bool = False
    """The request's chunks should outlive others of the same priority. For policies. Default: ``false``."""
    session: str | None = None
    """Conversation or agent run that the request belongs to. For policies. Default: unknown."""
    continues: float | None = None
    """Whether the session will send another request that starts with this one: ``"yes"``, ``"no"``, or a probability.
    For policies. Default: unknown."""
    closed: bool = False
    """This is the last request of its session. For policies. Default: ``false``."""
    one_shot: bool = False
    """No later request will have this prompt. Its stored chunks are not written below the host tier, and are the
    first to be evicted from it. A use by a request without this hint ends both. Default: ``false``."""

    @property
    def stores(self) -> bool:
        """Whether any tier may store the request's chunks."""
        return self.store is None or bool(self.store)

    @property
    def has_retention(self) -> bool:
        """Whether chunks stored under these hints have a retention of their own."""
        return self.ttl_s is not None or self.one_shot


NO_HINTS = RequestHints()
"""Hints of a request without hints."""

ALLOWED: Mapping[str, str] = {
    "load_tiers": "a list of names of tiers",
    "max_load_tokens": "a whole number of 0 or more",
    "max_offload_tokens": "a whole number of 0 or more",
    "store": "true, false or a list of names of tiers",
    "priority": f"a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}",
    "ttl_s": "a number of seconds above 0",
    "retain": "true or false",
    "session": f"text of 1 to {SESSION_CHARS_MAX} characters",
    "continues": '"yes", "no", or a probability from 0 to 1',
    "closed": "true or false",
    "one_shot": "true or false",
}
"""Allowed values by key, as text."""


@dataclass(frozen=True, slots=True)
class HintFault:
    """A hint that was ignored."""

    key: str
    """Path of the hint."""
    kind: str
    """Kind of the fault. ``key`` and ``kind`` together identify it."""
    message: str
    """Text for the user."""


class _WrongError(ValueError):
    """A value is not allowed. The text is the kind of fault: ``type`` or ``range``."""


def parse_hints(params: object, tiers: Collection[str] | None = None) -> tuple[RequestHints, list[HintFault]]:
    """Read the hints of a request from its ``kv_transfer_params``.

    ``max_offload_tokens`` may also be given beside ``tierkv`` instead of in it (S12). The inner one takes precedence.

    Args:
        params: value attached by the engine's user. A value that is no mapping gives a fault and no hints.
        tiers: names of the stack's tiers, to detect misspelt ones; None: any name is accepted.

    Returns:
        The hints, and the faults of ignored values.
    """
    if params is None:
        return NO_HINTS, []
    if not isinstance(params, Mapping):
        return NO_HINTS, [_wrong("kv_transfer_params", params, "type", "a mapping")]
    faults: list[HintFault] = []
    found: dict[str, Any] = {}
    if params.get("max_offload_tokens") is not None:
        _read("max_offload_tokens", "max_offload_tokens", params["max_offload_tokens"], found, faults)
    _read_all(params.get(HINTS), found, faults)
    if tiers is not None:
        for key in ("load_tiers", "store"):
            if found.get(key):
                found[key] = _known_names(f"{HINTS}.{key}", found[key], tiers, faults)
    return (RequestHints(**found) if found else NO_HINTS), faults


def params_of(hints: RequestHints) -> dict[str, Any]:
    """Parameters of a request that has these hints: what :func:`parse_hints` reads."""
    given = {name: getattr(hints, name) for name in ALLOWED if getattr(hints, name) != getattr(NO_HINTS, name)}
    return {HINTS: given} if given else {}


def _read_all(given: object, found: dict[str, Any], faults: list[HintFault]) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        faults.append(_wrong(HINTS, given, "type", "a mapping"))
        return
    for key, value in given.items():
        if key not in ALLOWED:
            faults.append(_unknown_key(key))
        elif value is not None:
            _read(f"{HINTS}.{key}", key, value, found, faults)


def _read(path: str, key: str, value: object, found: dict[str, Any], faults: list[HintFault]) -> None:
    try:
        found[key] = _READERS[key](value)
    except _WrongError as error:
        faults.append(_wrong(path, value, str(error), ALLOWED[key]))


def _known_names(path: str, names: frozenset[str], tiers: Collection[str], faults: list[HintFault]) -> frozenset[str]:
    for name in sorted(names.difference(tiers)):
        known = ", ".join(sorted(tiers))
        text = f"{path}: there is no tier {_shown(name)}{_nearest(name, tiers)}; it is ignored; tiers: {known}"
        faults.append(HintFault(path, f"no tier {name}", text))
    return names.intersection(tiers)


def _wrong(path: str, value: object, kind: str, allowed: str) -> HintFault:
    return HintFault(path, kind, f"{path} = {_shown(value)} is ignored: give {allowed}")


def _unknown_key(key: object) -> HintFault:
    text = f"{HINTS}.{key}" if isinstance(key, str) else f"key {_shown(key)} of {HINTS}"
    near = _nearest(key, ALLOWED) if isinstance(key, str) else ""
    path = text[:_SHOWN_CHARS_MAX]
    return HintFault(path, "unknown", f"{path} is unknown and ignored{near}; keys: {', '.join(ALLOWED)}")


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name[:_SHOWN_CHARS_MAX], names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of thousands of digits has no repr; other types may raise anything
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."


# -- one reader per kind of value: exactly the type, since True is not 1 and "1" is no number ------------------------


def _count(value: object) -> int:
    if type(value) is not int:
        raise _WrongError("type")
    if value < 0:
        raise _WrongError("range")
    return value


def _priority(value: object) -> int:
    if type(value) is not int:
        raise _WrongError("type")
    if not PRIORITY_MIN <= value <= PRIORITY_MAX:
        raise _WrongError("range")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise _WrongError("type")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongError("type")
    if not 0 < value <= sys.float_info.max:  # a whole number may exceed the range of float
        raise _WrongError("range")
    return float(value)


def _session(value: object) -> str:
    if not isinstance(value, str):
        raise _WrongError("type")
    if not 0 < len(value) <= SESSION_CHARS_MAX:
        raise _WrongError("range")
    return value


def _probability(value: object) -> float:
    if isinstance(value, str) and value in ("yes", "no"):
        return float(value == "yes")
    if not isinstance(value, int | float):
        raise _WrongError("range" if isinstance(value, str) else "type")
    if not 0 <= value <= 1:
        raise _WrongError("range")
    return float(value)


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise _WrongError("type")
    if len(value) > TIER_NAMES_MAX:
        raise _WrongError("range")
    return frozenset(value)


def _store(value: object) -> frozenset[str] | None:
    if isinstance(value, bool):
        return None if value else frozenset()
    return _names(value)


_READERS: Mapping[str, Callable[[object], Any]] = {
    "load_tiers": _names,
    "max_load_tokens": _count,
    "max_offload_tokens": _count,
    "store": _store,
    "priority": _priority,
    "ttl_s": _seconds,
    "retain": _flag,
    "session": _session,
    "continues": _probability,
    "closed": _flag,
    "one_shot": _flag,
}
