"""Lines of a trace: reading, and errors that name line, field, value and fix.

::

    {"timestamp": 1200, "hash_ids": [0, 14, 15, 16], "input_length": 2000, "output_length": 90,
     "tenant": "acme", "session": "c-81", "hints": {"continues": "yes"}}

``timestamp`` is in milliseconds, or in the unit that the reader gives, and never decreases. ``hash_ids`` has the ids of
the prompt's chunks from the front, as numbers or text; the last chunk may be covered in part. Like a chunk's key, an id
identifies its chunk and all chunks before it: an id never follows two different ids. All other fields are optional:

- ``input_length``, ``output_length``: tokens of prompt and answer.
- ``tenant``: the ``cache_salt`` of the request. Tenants share no chunk, whatever their ids.
- ``session``: short for the hint of this name.
- ``hints``: hints, as a request gives them in ``kv_transfer_params["tierkv"]``.

Unknown fields are ignored. The file may be compressed with gzip, whatever its name.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from tierkv.errors import ConfigError
from tierkv.types.hints import HINTS, NO_HINTS, SESSION_CHARS_MAX, RequestHints, parse_hints

ChunkId = int | str

_FIX = 'a line of a trace is a JSON object such as {"timestamp": 1200, "hash_ids": [0, 14, 15]}'
_ENCODING = "utf-8-sig"  # some editors begin a file with the mark of its encoding
_GZIP, _START_BYTES = b"\x1f\x8b", 8
_UNPACK = "unpack it, or pack it with gzip"
_OTHERS = {
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", _UNPACK),
    b"\xfd7zXZ\x00": ("compressed with xz", _UNPACK),
    b"BZh": ("compressed with bzip2", _UNPACK),
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"PAR1": ("a table in Parquet's format", _FIX),
    b"\xff\xfe": ("text in UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "save it as UTF-8"),
}
"""Beginnings of files that are often given in place of a trace: what they are, and what to do."""
_ID_BYTES = 16
_ID_MAX = 2 ** (8 * _ID_BYTES) - 1
_TOKENS_MAX = 2**31 - 1
LINE_CHARS_MAX = 64 << 20
"""Longest line that is read: a prompt of a million chunks. A compressed file may hold gigabytes of anything."""
MS = 1000.0
"""Milliseconds of a second: the unit of timestamps unless the reader gives another one."""
SECONDS_MAX = 1e12
"""Largest time of a request, in seconds. A clock since 1970 has it too late only if it counts microseconds."""
TENANT_CHARS_MAX = 4096
"""Characters of a tenant's name."""
_SHOWN_CHARS_MAX = 80


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One line, checked."""

    at_s: float
    """Arrival in seconds since the trace's zero."""
    chunk_ids: list[ChunkId]
    """Ids of the chunks, from the front of the prompt."""
    input_tokens: int | None
    """Tokens of the prompt; None: not given."""
    output_tokens: int | None
    """Tokens of the answer; None: not given."""
    tenant: str | None
    """Tenant; None: none."""
    hints: RequestHints
    """Hints, with the session."""


def read_lines(path: Path, units_per_s: float = MS) -> Iterator[TraceLine]:
    """Yield the lines of a trace, in order. Empty lines are skipped.

    Args:
        path: the file.
        units_per_s: units of a timestamp per second.

    Raises:
        ConfigError: the file cannot be read, it has no request, or a line is none. The message names line and fault.
    """
    before_s = -math.inf
    place = f"trace {path}"
    try:
        with _opened(path) as lines:
            for number, text in enumerate(iter(lambda: lines.readline(LINE_CHARS_MAX), ""), 1):
                place = f"trace {path}, line {number}"
                if len(text) == LINE_CHARS_MAX:
                    raise ConfigError(f"{place}: the line has more than {LINE_CHARS_MAX} characters; {_FIX}")
                if text.strip():
                    line = _parsed(text, before_s, units_per_s, place)
                    before_s = line.at_s
                    yield line
    except FileNotFoundError as error:
        raise ConfigError(f"trace {path}: there is no such file") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        what = "a directory" if isinstance(error, IsADirectoryError) else "no text in UTF-8"
        raise ConfigError(f"{place}: this is {what}; {_FIX}") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{place}: the file cannot be read further: {reason}") from error
    if before_s == -math.inf:
        raise ConfigError(f"trace {path}: no request is in it; {_FIX}; `tierkv trace` makes a trace of a record")


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open a file as what it holds: tools that fetch or copy it may add or drop an ending.

    Raises:
        ConfigError: it is compressed in another way, or is no UTF-8.
    """
    with path.open("rb") as file:
        start = file.peek(_START_BYTES)[:_START_BYTES]  # a pipe cannot be read again from its front
        for mark, (what, fix) in _OTHERS.items():
            if start.startswith(mark):
                raise ConfigError(f"trace {path}: this is {what}; {fix}")
        whole = cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if start.startswith(_GZIP) else file
        with io.TextIOWrapper(whole, encoding=_ENCODING) as lines:
            yield lines


def _parsed(text: str, before_s: float, units_per_s: float, place: str) -> TraceLine:
    """Parse one line.

    Raises:
        ConfigError: the line is no request.
    """
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: this is not JSON ({error}); {_FIX}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: {text.strip()[:_SHOWN_CHARS_MAX]!r} is no object; {_FIX}")
    if "is" in entry and "hash_ids" not in entry:
        raise ConfigError(f"{place}: this is the record of a stack; `tierkv trace` turns it into a trace")
    missing = [name for name in ("timestamp", "hash_ids") if name not in entry]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise ConfigError(f"{place}: {' and '.join(missing)} {verb} missing; {_FIX}")
    return TraceLine(
        _arrival(entry["timestamp"], before_s, units_per_s, place),
        _chunk_ids(entry["hash_ids"], place),
        _tokens(entry, "input_length", place),
        _tokens(entry, "output_length", place),
        _name(entry, "tenant", TENANT_CHARS_MAX, place),
        _hints(entry, place),
    )


def _arrival(timestamp: object, before_s: float, units_per_s: float, place: str) -> float:
    if type(timestamp) not in {int, float} or not _is_finite(timestamp):
        raise ConfigError(f"{place}: timestamp is {_shown(timestamp)}, and must be a number of milliseconds; {_FIX}")
    at_s = float(timestamp) / units_per_s  # type: ignore[arg-type]  # checked above
    if abs(at_s) > SECONDS_MAX:
        raise ConfigError(
            f"{place}: timestamp is {_shown(timestamp)}, more than {SECONDS_MAX:.0e} seconds; give it in milliseconds"
        )
    if at_s < before_s:
        raise ConfigError(
            f"{place}: timestamp {timestamp:g} is before that of the last request, {units_per_s * before_s:g}; sort "
            "the lines by it"
        )
    return at_s


def _is_finite(number: Any) -> bool:  # noqa: ANN401 - a number of JSON
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number beyond the range of float
        return False


def _chunk_ids(ids: object, place: str) -> list[ChunkId]:
    if not isinstance(ids, list) or not all(type(chunk_id) in {int, str} for chunk_id in ids):
        raise ConfigError(f"{place}: hash_ids must be a list of whole numbers or of texts; {_FIX}")
    for chunk_id in ids:
        if isinstance(chunk_id, int) and not 0 <= chunk_id <= _ID_MAX:
            raise ConfigError(f"{place}: in hash_ids, {_shown(chunk_id)} is not from 0 to 2**128 - 1")
        if isinstance(chunk_id, str) and not chunk_id.isascii() and not _is_utf8(chunk_id):
            raise ConfigError(f"{place}: in hash_ids, {_shown(chunk_id)} has half of a character; {_FIX}")
    if len(set(ids)) < len(ids):
        first = {one: place for place, one in reversed(list(enumerate(ids)))}
        twice = next(one for place, one in enumerate(ids) if first[one] < place)
        raise ConfigError(
            f"{place}: hash_ids has {_shown(twice)} twice; an id identifies its chunk and all chunks before it: hash "
            "each chunk together with the id before it"
        )
    return ids


def _is_utf8(text: str) -> bool:
    """Whether a text can be encoded: JSON can express halves of characters, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tokens(entry: dict[str, Any], name: str, place: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _TOKENS_MAX:
        raise ConfigError(
            f"{place}: {name} is {_shown(value)}, and must be a whole number of tokens from 0 to 2**31 - 1; leave the "
            "field out where it is unknown"
        )
    return value


def _name(entry: dict[str, Any], name: str, chars_max: int, place: str) -> str | None:
    value = entry.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= chars_max:
        raise ConfigError(
            f"{place}: {name} is {_shown(value)}, and must be text of 1 to {chars_max} characters; leave the field out "
            "where there is none"
        )
    return value


def _hints(entry: dict[str, Any], place: str) -> RequestHints:
    given, session = entry.get("hints"), _name(entry, "session", SESSION_CHARS_MAX, place)
    if given is None and session is None:
        return NO_HINTS
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f'{place}: hints is {_shown(given)}, and must be an object such as {{"continues": "yes"}}')
    hints, faults = parse_hints({HINTS: {"session": session, **(given or {})}})
    if faults:
        raise ConfigError(f"{place}: in hints, {faults[0].message.replace(f'{HINTS}.', '', 1)}")
    return hints


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
