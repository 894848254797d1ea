"""Sizes in bytes, written as ``"8GiB"``, ``"500MB"``, ``"1.5 GiB"`` or ``4096``.

Units are case-sensitive. ``GiB`` is 2**30 bytes and ``GB`` is 10**9 bytes, which differ by 7 %.
"""

from __future__ import annotations

import re
from fractions import Fraction

SIZE_BYTES_MAX = 2**63 - 1

_UNITS: dict[str, int] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_BINARY = [(f"{prefix}iB", 1024**power) for power, prefix in reversed(list(enumerate("KMGTP", start=1)))]
_NEAREST = sorted(_UNITS, key=len, reverse=True)
"""Units in the order in which they are compared with a wrong one: ``10g`` and ``10Gi`` mean GiB more often than GB."""
_SIZE = re.compile(r"\s*([+-]?)([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")

SIZE_ALLOWED = f'a whole number of bytes, or text with a unit like "8GiB"; units: {", ".join(_UNITS)}'


def parse_size(value: object) -> int:
    """Parse a size to a number of bytes, at least 1. A fraction of a byte is dropped.

    Raises:
        ValueError: the value is no size, has an unknown unit, or is outside 1 to 2**63 - 1 bytes. The message names the
            allowed values.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        sign, number, unit = match.groups()
        if unit and unit not in _UNITS:
            hint = next(
                (f"; did you mean {known}?" for known in _NEAREST if known.lower().startswith(unit.lower())), ""
            )
            raise ValueError(f"unknown unit {unit!r}{hint}; write {SIZE_ALLOWED}")
        if "." in number and not unit:
            raise ValueError(f"a fraction needs a unit; write {SIZE_ALLOWED}")
        size = int(Fraction(number) * _UNITS[unit or "B"]) * (-1 if sign == "-" else 1)
    else:
        raise ValueError(f"not a size; write {SIZE_ALLOWED}")
    if size < 1:
        raise ValueError(f"must be at least 1 byte; write {SIZE_ALLOWED}")
    if size > SIZE_BYTES_MAX:
        raise ValueError(f"must be at most {SIZE_BYTES_MAX} bytes (8 EiB)")
    return size


def format_size(size_bytes: int) -> str:
    """Format a size exactly, with the largest binary unit that needs at most two decimals: ``"1.5GiB"``, ``"4097B"``.

    For every size of at least 1, ``parse_size(format_size(size)) == size``.
    """
    for unit, unit_bytes in _BINARY:
        hundredths = Fraction(abs(size_bytes) * 100, unit_bytes)
        if abs(size_bytes) >= unit_bytes and hundredths.denominator == 1:
            return f"{float(Fraction(size_bytes, unit_bytes)):.2f}".rstrip("0").rstrip(".") + unit
    return f"{size_bytes}B"
