"""Codecs on bfloat16 values as a decoder's KV has them: how small, and how fast beside cutting bytes apart.

The values are made, not recorded: channels of different widths around zero. The bound on size is the entropy of single
exponents; the limit in time is the least that any coder of planes has to do, which is to make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.measure import Cost, Settings, cpu_ratios, cpu_s_per_gb, medians, take_turns, timed
from benchmarks.rows import Row, Target
from tierkv.abc.codec import Codec
from tierkv.plugins import load_plugins

_Values = np.ndarray[tuple[int], np.dtype[np.uint16]]


def run(settings: Settings) -> Iterator[Row]:
    """Every installed codec that shrinks the values: ratio, encode, decode."""
    values = _values(settings.pick(1 << 20, 1 << 12))
    for name, registered in sorted(load_plugins().codecs.items()):
        if not registered.plugin.lossy:
            yield from _rows(name, registered.plugin.open(), values, settings)


def _values(count: int) -> _Values:
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=(count // 128, 128)) * rng.lognormal(0, 1, 128)).astype(np.float32).reshape(-1)
    found: _Values = (floats.view(np.uint32) >> 16).astype(np.uint16)
    return found


def _bound(values: _Values) -> float:
    counts = np.bincount((values >> 7) & 0xFF)
    shares = counts[counts > 0] / counts.sum()
    return float(16 / (8 - (shares * np.log2(shares)).sum()))


def _rows(name: str, codec: Codec, values: _Values, settings: Settings) -> Iterator[Row]:
    raw = memoryview(values.tobytes())
    out, back = memoryview(bytearray(len(raw))), memoryview(bytearray(len(raw)))
    written = codec.encode(raw, out)
    if written is None:
        return
    stored = out[:written]
    codec.decode(stored, back)
    if back != raw:
        raise RuntimeError(f"codec {name} gave back other bytes")
    target = Target("ratio", ">=", 0.98) if name == "bf16" else None
    ratio = len(raw) / written
    yield Row(f"{name}, size", "times smaller", ratio, "entropy of single exponents", _bound(values), (), target)
    planes = np.empty((2, len(values)), np.uint8)

    def cut() -> Cost:
        return timed(lambda: np.copyto(planes, values.view(np.uint8).reshape(-1, 2).T))

    for what, work, least in (
        ("encode", partial(codec.encode, raw, out), 0.25),
        ("decode", partial(codec.decode, stored, back), 0.45),
    ):
        turns = take_turns([partial(timed, work), cut], settings.rounds)
        costs = [cpu_s_per_gb(medians(turn), len(raw)) for turn in turns]
        speeds = [1 / max(1e-9, cost) for cost in costs]
        yield Row(
            f"{name}, {what}",
            "GB/s",
            speeds[0],
            "cutting the bytes of values into two planes",
            speeds[1],
            [1 / ratio for ratio in cpu_ratios(*turns)],
            Target("ratio", ">=", least) if name == "bf16" else None,
            {"cpu s/GB": costs[0], "cpu s/GB of the limit": costs[1]},
        )
