"""Helpers of the disk tier's tests: a namespace, and a reader of the log that shares no code with the tier."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

PAGE = 4096
CHILD_TIMEOUT_S = 60
OpenDisk = Callable[..., Session]


def make_namespace(model: str = "disk-tests") -> Namespace:
    """Namespace of the tests."""
    return Namespace(
        model=model,
        revision="r1",
        dtype="bfloat16",
        layout="page",
        groups=((16, (4096,), "full_attention", None),),
        blocks_per_chunk=4,
        hash_block_tokens=16,
    )


class LogLine(NamedTuple):
    """Record as docs/format.md describes it, read without the code under test."""

    kind: int
    key: bytes
    part: int
    segment: int
    page: int
    frame_bytes: int


def read_log(path: Path) -> list[LogLine]:
    """Records of an undamaged log up to the zeros at its end; checksums are not verified."""
    data = path.read_bytes()[128:]
    lines = []
    for start in range(0, len(data) - 127, 128):
        _, kind, key_bytes, part, page, segment, frame_bytes, key = struct.unpack_from("<8sBBHIII104s", data, start)
        if kind == 0:
            break
        lines.append(LogLine(kind, key[:key_bytes], part, segment, page, frame_bytes))
    return lines


def frames(*numbers: int, version: int = 1, size: int = PAGE) -> dict[Key, bytes]:
    """Frame of ``size`` bytes for each numbered key."""
    return {make_key(number): make_frame(make_key(number), version, size) for number in numbers}


def num_descriptors() -> int:
    """Number of files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def run_alone(program: str, path: Path) -> str:
    """Run Python code in a process of its own, with ``path`` in ``sys.argv[1]``, and return what it prints.

    A limit set by ``setrlimit`` belongs to the process: servers of other tests may run in this one. ``-B``, because a
    limit of file sizes would cut the compiled file of each module that is imported under it.
    """
    found = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {found!r}\n{program}"
    command = [sys.executable, "-B", "-I", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
