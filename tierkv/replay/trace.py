"""Traces of requests with their times and chunks: one JSON object per line, as in published traces of LLM servers.

::

    {"timestamp": 1200, "hash_ids": [0, 14, 15, 16]}

``timestamp`` is in milliseconds and never decreases. ``hash_ids`` has the ids of the prompt's whole chunks from the
front, as numbers or text. Like a chunk's key, an id identifies its chunk and all chunks before it: an id never follows
two different ids. Other fields, such as lengths in tokens, are ignored. The file may be compressed (``.gz``).
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tierkv.errors import ConfigError
from tierkv.types.keys import Key, make_key

_FIX = 'a line of a trace is a JSON object such as {"timestamp": 1200, "hash_ids": [0, 14, 15]}'


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Arrival in seconds since the trace's zero."""
    keys: tuple[Key, ...]
    """Keys of its chunks, from the front of the prompt."""


class KeysOfIds:
    """Keys by id of a trace. Each key is one shared object, because a trace repeats ids."""

    def __init__(self) -> None:
        self._keys: dict[int | str, Key] = {}

    def key(self, chunk_id: int | str) -> Key:
        """Return the key of an id.

        Raises:
            ValueError: the id is a number below 0 or of more than 16 bytes.
        """
        key = self._keys.get(chunk_id)
        if key is None:
            try:
                raw = chunk_id.encode() if isinstance(chunk_id, str) else chunk_id.to_bytes(16, "big")
            except OverflowError as error:
                raise ValueError(f"{chunk_id} is not from 0 to 2**128 - 1") from error
            key = self._keys[chunk_id] = make_key(raw, 0)
        return key


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, in order.

    Raises:
        ConfigError: the file cannot be read, or a line is no request. The message names the line and the fault.
    """
    ids = KeysOfIds()
    before = TraceRequest(float("-inf"), ())
    place = f"trace {path}"
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                place = f"trace {path}, line {number}"
                if line.strip():
                    before = _request(line, ids, before, place)
                    yield before
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{place}: the file cannot be read further: {reason}") from error


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _request(line: str, ids: KeysOfIds, before: TraceRequest, place: str) -> TraceRequest:
    """Parse one line.

    Raises:
        ConfigError: the line is no request.
    """
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: this is not JSON ({error}); {_FIX}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: {line.strip()[:80]!r} is no object; {_FIX}")
    missing = [name for name in ("timestamp", "hash_ids") if name not in entry]
    if missing:
        raise ConfigError(f"{place}: {' and '.join(missing)} is missing; {_FIX}")
    timestamp, chunk_ids = entry["timestamp"], entry["hash_ids"]
    if type(timestamp) not in {int, float} or not math.isfinite(timestamp):
        raise ConfigError(f"{place}: timestamp is {timestamp!r}, and must be a number of milliseconds; {_FIX}")
    if timestamp / 1000 < before.at_s:
        raise ConfigError(
            f"{place}: timestamp {timestamp:g} is before that of the last request, {1000 * before.at_s:g}; sort the "
            "lines by it"
        )
    if not isinstance(chunk_ids, list) or not all(type(chunk_id) in {int, str} for chunk_id in chunk_ids):
        raise ConfigError(f"{place}: hash_ids must be a list of whole numbers or of texts; {_FIX}")
    try:
        return TraceRequest(timestamp / 1000, tuple(ids.key(chunk_id) for chunk_id in chunk_ids))
    except ValueError as error:
        raise ConfigError(f"{place}: in hash_ids, {error}") from error
