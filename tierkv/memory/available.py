"""Memory that this process may use: of the machine, or less in a container with a limit."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_MACHINE = Path("/proc/meminfo")


def usable_bytes() -> int:
    """Return the bytes that this process may use in all."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _number(_LIMIT)
    return machine if limit is None else min(machine, limit)


def available_bytes() -> int | None:
    """Return the bytes that it may still use without others being swapped out; None if the system does not say."""
    try:
        lines = _MACHINE.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    limit, used = _number(_LIMIT), _number(_USED)
    return available if limit is None or used is None else min(available, limit - used)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
