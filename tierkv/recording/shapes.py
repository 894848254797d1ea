"""Check of entries as read: a record may be damaged, cut short, or not one at all.

A field has one type in every kind of entry. Readers rely on the types, and on the fields that each kind requires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tierkv.recording.entries import Entry

_SECONDS_MAX = 1e10
_COUNT_MAX = 2**63 - 1


def is_whole(entry: object) -> bool:
    """Whether a value of a record's line is an entry whose fields have the types that readers expect.

    Kinds and fields of a later version pass.
    """
    if not isinstance(entry, dict) or not isinstance(kind := entry.get("is"), str):
        return False
    fields = _REQUIRED.get(kind, ())
    return (
        all(name in entry for name in _ALWAYS)
        and all(name in entry for name in fields)
        and all(_FIELDS[name](value) for name, value in entry.items() if name in _FIELDS)
        and (kind != "prompt" or _is_prompt(entry))
    )


def _is_prompt(entry: Entry) -> bool:
    """Whether the first entry of a prompt has what only the first one has."""
    return bool(entry["at"]) or ("asked" in entry and entry.get("tokens") is not None)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _COUNT_MAX


def _is_count_or_none(value: object) -> bool:
    return value is None or _is_count(value)


def _is_number(value: Any) -> bool:  # noqa: ANN401 - read from a file
    return (type(value) is int and abs(value) <= _COUNT_MAX) or (type(value) is float and math.isfinite(value))


def _is_time(value: Any) -> bool:  # noqa: ANN401 - read from a file
    return _is_number(value) and abs(value) <= _SECONDS_MAX


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are_texts_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_account(value: object) -> bool:
    """Whether it is the account of a request; empty where the request had none."""
    if not isinstance(value, dict):
        return False
    loaded = value.get("loaded_tokens", {})
    return (
        isinstance(loaded, dict)
        and all(map(_is_count, loaded.values()))
        and _is_count(value.get("stored_tokens", 0))
        and (not value.get("deferrals") or (_is_count(value["deferrals"]) and _is_number(value.get("deferred_s"))))
    )


def _are_values(value: object) -> bool:
    """Whether they are numbers by metric and label."""
    return isinstance(value, dict) and all(
        isinstance(row, dict) and all(map(_is_number, row.values())) for row in value.values()
    )


def _are_histograms(value: object) -> bool:
    """Whether they are buckets and a sum by metric and label."""
    return isinstance(value, dict) and all(
        isinstance(rows, dict)
        and all(isinstance(row, list) and len(row) > 1 and all(map(_is_number, row)) for row in rows.values())
        for rows in value.values()
    )


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("r", "event", "before", "after", "tenant", "adapter", "why", "missing", "tier", "verb", "opened", "model"),
        _is_text,
    ),
    **dict.fromkeys(
        ("step", "at", "local", "ready", "chunks", "job", "op", "ok", "entries", "pid", "chunk_tokens", "chunk_bytes"),
        _is_count,
    ),
    **dict.fromkeys(("store", "expired", "late", "usable"), _is_flag),
    **dict.fromkeys(("keys", "wanted", "failed", "tiers"), _is_texts),
    **dict.fromkeys(("tokens", "generated"), _is_count_or_none),
    **dict.fromkeys(("t", "asked"), _is_time),
    **dict.fromkeys(("counters", "gauges"), _are_values),
    "hints": _is_object,
    "bad": _are_texts_by_name,
    "account": _is_account,
    "histograms": _are_histograms,
}
"""Check of each field, by its name."""

_ALWAYS = ("step", "t")
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "record": ("tiers", "opened", "model", "pid"),
    "request": ("r", "event", "before", "after"),
    "prompt": ("r", "at", "keys"),
    "answer": ("r", "local", "tokens", "why", "wanted", "ready", "chunks", "expired"),
    "job": ("r", "job", "store", "keys"),
    "job end": ("job", "failed"),
    "not stored": ("r", "keys"),
    "op": ("op", "tier", "verb", "keys"),
    "op end": ("op", "tier", "verb", "ok", "bad", "late"),
    "chunks": ("tier", "event", "keys"),
    "health": ("tier", "usable", "why"),
    "metrics": ("counters", "gauges", "histograms"),
    "finished": ("r", "account"),
    "lost": ("entries",),
}
"""Fields that readers expect in each kind of entry."""
