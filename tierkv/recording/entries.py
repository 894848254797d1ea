"""Entries of a record. Each line is a JSON object with ``is``, ``step`` and ``t``.

``t`` is in seconds since the stack was opened. Keys are shortened: at most 16 bytes of the chunk's hash, a dot, the
group. ``is`` is one of

::

    record     a stack was opened: its tiers, the wall clock
    request    a request changed its state: r, event, before, after
    prompt     the prompt of a request, with its first answer: r, keys of its chunks from number at on; in the first
               of its entries also asked (t of its first lookup), tokens, tenant and adapter (digests), hints
    answer     a lookup was answered: r, local and offered tokens (null: deferred), why, wanted and ready chunks
    job        a transfer between GPU and host begins: r, job, store, keys
    job end    a transfer has ended: job, r, failed keys
    op         an operation of a tier begins: op, tier, verb, keys
    op end     it has ended, or its deadline has passed (late): op, tier, verb, ok, bad (key -> why)
    chunks     chunks became available or were removed: tier, event, keys
    health     a tier went out of service or back into it: tier, usable, why
    metrics    every few seconds: increments of counters and histograms, and all gauges, by the value of their label
    finished   a request has ended: r, its account, and its number of generated tokens
    reset      the host tier was emptied
    lost       entries could not be written in time: their number
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tierkv.types.keys import Key, split_key

Entry = dict[str, Any]

KEYS_PER_LINE = 32
"""Keys in one line at most; more keys take several lines."""

_HASH_BYTES_MAX = 16


def now_as_text() -> str:
    """Return the wall clock as the entry ``record`` has it. Milliseconds tell two stacks of one second apart."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def opened_at_s(head: Entry) -> float | None:
    """Return when the stack of an entry ``record`` was opened, in seconds since 1970; None if it does not say."""
    try:
        return datetime.fromisoformat(str(head.get("opened"))).timestamp()
    except (ValueError, OverflowError):
        return None


def short_key(key: bytes) -> str:
    """Return a key as a record has it."""
    try:
        chunk_hash, group = split_key(key)
    except ValueError:
        return key.hex()
    return f"{chunk_hash[:_HASH_BYTES_MAX].hex()}.{group}"


def runs(keys: Sequence[Key]) -> list[Sequence[Key]]:
    """Cut keys into pieces that fit a line; at least one piece, perhaps empty."""
    return [keys[i : i + KEYS_PER_LINE] for i in range(0, len(keys), KEYS_PER_LINE)] or [()]


def matches(short: str, wanted: str) -> bool:
    """Whether a short key matches ``wanted``: a short key, the whole key in hex, or the beginning of its hash."""
    digits, dot, group = wanted.partition(".")
    known, _, known_group = short.partition(".")
    if dot and group != known_group:
        return False
    if len(digits) >= len(known):  # the whole hash, or the whole key with its group
        return digits.startswith(known)
    return known.startswith(digits)
