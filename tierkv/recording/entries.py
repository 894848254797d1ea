"""Entries of a record. Each line is a JSON object with ``is``, ``step`` and ``t``.

``t`` is in seconds since the stack was opened. Keys are shortened: at most 16 bytes of the chunk's hash, a dot, the
group; for a tenant ``@`` and its digest, and for an adapter ``+`` and its digest: ``5bb0ec31.0@7c1f``. ``is`` is one of

::

    record     a stack was opened: version of these entries, its tiers, the wall clock
    request    a request changed its state: r, event, before, after
    prompt     the prompt of a request, with its first answer: r, keys of its chunks from number at on; in the first
               of its entries also asked (t of its first lookup), tokens, tenant and adapter (digests), hints
    answer     a lookup was answered: r, local and offered tokens (null: deferred), why, wanted and ready chunks
    job        a transfer between GPU and host begins: r, job, store, keys
    job end    a transfer has ended: job, r, failed keys
    not stored a request ended before the host tier took its chunks: r, keys of the first ones
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

from tierkv.types.keys import Key, scope_of_key, split_key

Entry = dict[str, Any]

VERSION = 2
"""Version of the entries that a stack writes, in the entry ``record``."""
READ_VERSIONS = (1, VERSION)
"""Versions that are read. Keys of version 1 have neither tenant nor adapter."""

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
    tenant, adapter = scope_of_key(key)
    scope = f"@{tenant.hex()}" if tenant or adapter else ""
    return f"{chunk_hash[:_HASH_BYTES_MAX].hex()}.{group}{scope}" + (f"+{adapter.hex()}" if adapter else "")


def without_group(short: str) -> str:
    """Return what the short keys of a chunk in all groups have in common: its hash, tenant and adapter."""
    digits, _, scope = _parts(short)
    return f"{digits}@{scope}" if scope else digits


def runs(keys: Sequence[Key]) -> list[Sequence[Key]]:
    """Cut keys into pieces that fit a line; at least one piece, perhaps empty."""
    return [keys[i : i + KEYS_PER_LINE] for i in range(0, len(keys), KEYS_PER_LINE)] or [()]


def matches(short: str, wanted: str) -> bool:
    """Whether a short key matches ``wanted``: a short key, the whole key in hex, or the beginning of its hash.

    Behind the hash, ``@`` and the beginning of the tenant's digest choose a tenant; ``@`` alone those without one.
    """
    known, known_group, known_scope = _parts(short)
    digits, group, scope = _parts(wanted)
    if group and group != known_group:
        return False
    if scope is not None and (not (known_scope or "").startswith(scope) or (known_scope and not scope)):
        return False
    if len(digits) > len(known):  # the whole hash, or the whole key with its tenant and group
        return _is_key(short, digits) or (digits.startswith(known) and (scope is not None or not known_scope))
    return known.startswith(digits)


def _parts(short: str) -> tuple[str, str, str | None]:
    """Hash, group and scope of a short key, which may lack the last two; None: no scope is named."""
    front, at, scope = short.partition("@")
    digits, _, group = front.partition(".")
    return digits, group, scope if at else None


def _is_key(short: str, digits: str) -> bool:
    try:
        return short == short_key(bytes.fromhex(digits))
    except ValueError:
        return False
