"""What a request may say about its chunks: ``kv_transfer_params["tierkv"]``, read strictly, ignored aloud where wrong.

Every key is optional, and a hint never makes an answer wrong: at worst a chunk is computed again.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

HINTS = "tierkv"
"""The key of ``kv_transfer_params`` under which the hints stand."""

PRIORITY_MIN, PRIORITY_MAX = -100, 100
SESSION_CHARS_MAX = 256
TIER_NAMES_MAX = 64
_SHOWN_CHARS_MAX = 80


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request, as read. What a key allows stands in :data:`ALLOWED`.

    load_tiers: Tiers that a hit may come from, ``host`` among them if it is named. A chunk counts as there if one of
        these has it; no other tier is asked or read for this request. Bytes are taken from the host tier's copy where
        there is one. Empty: nothing is loaded. Default: all tiers.
    max_load_tokens: At most so many tokens are loaded, beyond those that the engine has itself. 0: the tiers are not
        even asked. Default: no bound.
    max_offload_tokens: Only chunks that end within the first so many tokens are stored. Default: no bound.
    store: ``false``: nothing is stored. A list: what is stored goes no further than these tiers; it passes through
        the host tier, named or not. Empty: nothing is stored. A chunk that is in the host tier already keeps the terms
        of whoever stored it. Default: ``true``, everywhere.
    priority: How much its chunks are worth beside those of others, higher is more; for policies. Default: 0.
    ttl_s: Seconds after which a chunk stored under it counts as absent and is deleted. Every later use under a
        ``ttl_s`` may prolong that, never shorten it; a use without one makes the chunk stay. Such chunks do not
        cascade to tiers that other processes share. A restart forgets the time. Default: chunks stay.
    retain: Its chunks should outlive others of their priority; for policies. Default: ``false``.
    session: Which conversation or agent run this request belongs to; for policies. Default: unknown.
    continues: Whether the session will send another request that starts with this one: ``"yes"``, ``"no"``, or the
        probability of it; for policies. Default: unknown.
    closed: This is the last request of its session; for policies. Default: ``false``.
    one_shot: Nobody will ask for this prompt again: chunks that it stores do not cascade below the host tier, and leave
        it before all others. A use by a request that is not one-shot ends that. Default: ``false``.
    """

    load_tiers: frozenset[str] | None = None
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    store: frozenset[str] | None = None
    priority: int = 0
    ttl_s: float | None = None
    retain: bool = False
    session: str | None = None
    continues: float | None = None
    closed: bool = False
    one_shot: bool = False

    @property
    def stores(self) -> bool:
        """Whether anything may be stored. ``store`` is the set of tiers that may get it, None for all."""
        return self.store is None or bool(self.store)

    @property
    def has_terms(self) -> bool:
        """Whether chunks stored under these hints are kept on terms of their own."""
        return self.ttl_s is not None or self.one_shot


NO_HINTS = RequestHints()
"""The hints of a request that gives none."""

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
"""Per key, what may be given."""


@dataclass(frozen=True, slots=True)
class HintFault:
    """Something that was ignored. ``kind`` and ``key`` together name the fault, ``message`` tells a user."""

    key: str
    kind: str
    message: str


class _WrongError(ValueError):
    """A value cannot be used. Its text is the kind of fault: ``type`` or ``range``."""


def parse_hints(params: object, tiers: Collection[str] | None = None) -> tuple[RequestHints, list[HintFault]]:
    """Read the hints out of a request's ``kv_transfer_params``.

    ``max_offload_tokens`` may also stand beside ``tierkv`` instead of in it (S12); the inner one counts.

    Args:
        params: what the engine's user attached; anything that is no mapping says nothing.
        tiers: names of the tiers there are, to find misspelt ones; None: any name will do.

    Returns:
        The hints, and what was ignored of them.
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
    except Exception:  # noqa: BLE001 - a whole number of thousands of digits has no repr, and who knows what else
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
    if not 0 < value <= sys.float_info.max:  # a whole number may lie beyond what a float can be
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
