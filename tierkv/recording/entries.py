"""What a line of a record says. One JSON object per line; every line has ``is``, ``step`` and ``t``.

``t`` is in seconds since the stack was opened. Keys are written short: at most 16 bytes of the chunk's hash, a dot, the
group. ``is`` is one of

::

    record     a stack was opened: its tiers, the wall clock
    request    a request changed its state: r, event, before, after
    answer     what a lookup was answered: r, local and offered tokens (null: ask again), why, wanted chunks, ready ones
    job        a transfer between GPU and host begins: r, job, store, keys
    job end    ... has ended: job, r, failed keys
    op         a tier is asked to do something: op, tier, verb, keys
    op end     ... has done it, or its deadline passed (late): op, tier, verb, ok, bad (key -> why)
    chunks     chunks came or went: tier, event, keys
    health     a tier is used again, or not any more: tier, usable, why
    finished   a request is over: r, and its account
    reset      the host tier was emptied
    lost       so many entries could not be written in time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkv.types.keys import Key, split_key

Entry = dict[str, Any]

KEYS_PER_LINE = 32
"""Keys in one line; more make several lines."""

_HASH_BYTES_MAX = 16


def short_key(key: bytes) -> str:
    """A key as it is written in a record."""
    try:
        chunk_hash, group = split_key(key)
    except ValueError:
        return key.hex()
    return f"{chunk_hash[:_HASH_BYTES_MAX].hex()}.{group}"


def runs(keys: Sequence[Key]) -> list[Sequence[Key]]:
    """Keys, cut into pieces that fit a line; at least one piece."""
    return [keys[i : i + KEYS_PER_LINE] for i in range(0, len(keys), KEYS_PER_LINE)] or [()]


def matches(short: str, wanted: str) -> bool:
    """Whether a short key is meant by ``wanted``: a short key, the whole key in hex, or the beginning of its hash."""
    digits, dot, group = wanted.partition(".")
    known, _, known_group = short.partition(".")
    if dot and group != known_group:
        return False
    if len(digits) >= len(known):  # the hash, perhaps longer than what is written, or the whole key with its group
        return digits.startswith(known)
    return known.startswith(digits)
