"""Sizes in bytes for a reader: messages, tables and results of checks write them alike."""

from __future__ import annotations

_UNITS = [(f"{prefix}iB", 1024**power) for power, prefix in reversed(list(enumerate("KMGTP", start=1)))]


def round_size(size_bytes: float) -> str:
    """Format a size with about three digits and the unit that fits: ``"1.23 GiB"``. On any thread."""
    for unit, unit_bytes in _UNITS:
        if abs(size_bytes) >= unit_bytes:
            value = size_bytes / unit_bytes
            decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0  # noqa: PLR2004  powers of ten
            return f"{value:.{decimals}f} {unit}"
    return f"{size_bytes:.0f} B"
