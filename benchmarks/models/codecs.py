"""Codecs on bfloat16 values as in a decoder's KV: compression, speed, and the error of lossy ones.

The values are made, not recorded: channels of different widths around zero. The bound on the size of lossless codecs is
the entropy of single exponents, of lossy ones a byte per value. The limit in time is the
necessary work: for codecs of planes, making them; for all others, copying the payload once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.measure import Cost, Settings, cpu_ratios, cpu_s_per_gb, medians, take_turns, timed
from benchmarks.rows import Row, Target
from tierkv.abc import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame, CodecPlugin
from tierkv.codecs.aes_gcm import AesGcmCodec
from tierkv.plugins.loading import load_plugins
from tierkv.types.namespace import Namespace

Values = np.ndarray[tuple[int], np.dtype[np.uint16]]
"""bfloat16 values, as their bits."""

NAMESPACE = Namespace("benchmark", "", "bfloat16", "page", ((16, (65_536,), "full_attention", None),), 1, 16)
_TARGETS = {"bf16, size": 0.98, "bf16, encode": 0.25, "bf16, decode": 0.45}


@dataclass(frozen=True, slots=True)
class Subject:
    """Codec to measure, with its name in the table."""

    name: str
    codec: Codec
    plugin: CodecPlugin

    def bound(self, values: Values) -> tuple[str, float]:
        """Bound of the size of values: its name, and the compression that it allows."""
        if self.plugin.lossy:
            return "a byte for each value", 2.0
        if self.name in {"none", "aes-256-gcm"}:
            return "the payload itself", 1.0
        return "entropy of single exponents", exponent_bound(values)


def run(settings: Settings) -> Iterator[Row]:
    """Measure every installed codec that changes the values: size, encode, decode; and the error of lossy ones."""
    values = _values(settings.pick(1 << 20, 1 << 12))
    for subject in subjects():
        yield from _rows(subject, values, settings)


def subjects() -> Iterator[Subject]:
    """All installed codecs; the encrypting one also with another one inside."""
    plugins = {name: registered.plugin for name, registered in load_plugins().codecs.items()}
    for name, plugin in sorted(plugins.items()):
        if name != "aes-256-gcm":
            yield Subject(name, plugin.open(CodecContext(NAMESPACE), plugin.options()), plugin)
            continue
        inner = {other: plugins[other].open(CodecContext(NAMESPACE), plugins[other].options()) for other in ("bf16",)}
        for chosen in ("none", "bf16"):
            shown = name if chosen == "none" else f"{name} with {chosen} inside"
            yield Subject(shown, AesGcmCodec([os.urandom(32)], chosen, inner), plugin)


def _values(count: int) -> Values:
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=(count // 128, 128)) * rng.lognormal(0, 1, 128)).astype(np.float32).reshape(-1)
    found: Values = (floats.view(np.uint32) >> 16).astype(np.uint16)
    return found


def exponent_bound(values: Values) -> float:
    """Compression of values if each exponent takes its entropy, and nothing else shrinks."""
    counts = np.bincount((values >> 7) & 0xFF)
    shares = counts[counts > 0] / counts.sum()
    return float(16 / (8 - (shares * np.log2(shares)).sum()))


def _as_floats(values: memoryview) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (np.frombuffer(values, np.uint16).astype(np.uint32) << 16).view(np.float32)


def error_over_values(values: memoryview, back: memoryview) -> float:
    """Root of the mean square error, divided by that of the mean square value."""
    truth = _as_floats(values).astype(np.float64)
    return float(np.sqrt(np.square(_as_floats(back) - truth).mean() / np.square(truth).mean()))


def _rows(subject: Subject, values: Values, settings: Settings) -> Iterator[Row]:
    name, codec, lossy = subject.name, subject.codec, subject.plugin.lossy
    raw = memoryview(values.tobytes())
    out, back = memoryview(bytearray(len(raw))), memoryview(bytearray(len(raw)))
    frame = CodecFrame(b"benchmark", memoryview(bytearray(CODEC_NOTES_BYTES)), memoryview(bytearray(16)))
    written = codec.encode(raw, out, frame)
    if written is None:
        return
    stored = out[:written]
    codec.decode(stored, back, frame)
    if back != raw and not lossy:
        raise RuntimeError(f"codec {name} gave back other bytes")
    bound_name, bound = subject.bound(values)
    error = {"error over values, root of mean squares": error_over_values(raw, back)} if lossy else {}
    ratio = len(raw) / written
    yield Row(f"{name}, size", "times smaller", ratio, bound_name, bound, (), _target(f"{name}, size"), error)
    planes, copy = np.empty((2, len(values)), np.uint8), np.empty_like(values)

    def cut() -> Cost:
        return timed(lambda: np.copyto(planes, values.view(np.uint8).reshape(-1, 2).T))

    least, limit = (cut, "cutting the bytes of values into two planes") if name == "bf16" else (
        partial(timed, partial(np.copyto, copy, values)), "memcpy of the payload"
    )  # fmt: skip
    for what, work in (
        ("encode", partial(codec.encode, raw, out, frame)),
        ("decode", partial(codec.decode, stored, back, frame)),
    ):
        # Encrypted bytes differ each time: what is decoded must be what the last encode wrote.
        codec.encode(raw, out, frame)
        turns = take_turns([partial(timed, work), least], settings.rounds)
        costs = [cpu_s_per_gb(medians(turn), len(raw)) for turn in turns]
        speeds = [1 / max(1e-9, cost) for cost in costs]
        yield Row(
            f"{name}, {what}",
            "GB/s",
            speeds[0],
            limit,
            speeds[1],
            [1 / ratio for ratio in cpu_ratios(*turns)],
            _target(f"{name}, {what}"),
            {"cpu s/GB": costs[0], "cpu s/GB of the limit": costs[1]},
        )


def _target(row: str) -> Target | None:
    return Target("ratio", ">=", _TARGETS[row]) if row in _TARGETS else None
