"""Codec for bfloat16 payloads. test_codecs.py tests the rules of all codecs."""

from __future__ import annotations

import codec_parts
import numpy as np
import pytest
import zstandard

from tierkv.codecs.bf16 import LENGTH_BYTES, VALUES_PER_STEP, Bf16Codec
from tierkv.codecs.zstd import ZstdCodec
from tierkv.errors import CorruptFrameError


def kv_like(values: int, seed: int = 0) -> bytes:
    """Return bfloat16 values with the distribution of activations: channels of different widths around zero."""
    rng = np.random.default_rng(seed)
    widths = rng.lognormal(0, 1, 128)
    floats = (rng.normal(size=(-(-values // 128), 128)) * widths).astype(np.float32).reshape(-1)[:values]
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def encoded(raw: bytes) -> bytes:
    """Return the stored form."""
    stored = codec_parts.encoded(Bf16Codec(), raw)
    assert stored is not None
    return stored


@pytest.mark.parametrize("values", [4096, VALUES_PER_STEP, VALUES_PER_STEP + 1, 3 * VALUES_PER_STEP + 77])
@pytest.mark.parametrize("odd", [b"", b"\x07"])
def test_values_are_restored(values: int, odd: bytes) -> None:
    """Also if the payload is not a multiple of a step, or of a value."""
    raw = kv_like(values) + odd
    assert codec_parts.decoded(Bf16Codec(), encoded(raw), len(raw)) == raw


def test_every_bit_pattern_is_restored() -> None:
    """NaN, infinities, denormals and both zeros. Repeated, so that the payload shrinks."""
    raw = np.repeat(np.arange(2**16, dtype=np.uint16), 4).tobytes()
    assert codec_parts.decoded(Bf16Codec(), encoded(raw), len(raw)) == raw


def test_it_nearly_reaches_the_entropy_of_the_exponents() -> None:
    """Within 2 % of the limit of a coder of single exponents, and better than plain Zstandard."""
    raw = kv_like(512 * 1024)
    counts = np.bincount((np.frombuffer(raw, np.uint16) >> 7) & 0xFF)
    shares = counts[counts > 0] / counts.sum()
    bound = 16 / (8 - (shares * np.log2(shares)).sum())
    ratio = len(raw) / len(encoded(raw))
    plain = codec_parts.encoded(ZstdCodec(), raw) or raw
    assert bound * 0.98 <= ratio <= bound
    assert ratio > len(raw) / len(plain)


def test_noise_is_declined() -> None:
    """Random bytes have random exponents. Stored raw, they are read without decoding."""
    raw = np.random.default_rng(1).bytes(200_000)
    assert codec_parts.encoded(Bf16Codec(), raw) is None


@pytest.mark.parametrize("damage", ["longer", "shorter", "length", "exponents", "foreign", "empty"])
def test_damaged_data_is_refused(damage: str) -> None:
    """Any damage raises CorruptFrameError and nothing else."""
    raw = kv_like(10_000)
    good = encoded(raw)
    bad = {
        "longer": good + b"x",
        "shorter": good[:-1],
        "length": (2**31).to_bytes(LENGTH_BYTES, "little") + good[LENGTH_BYTES:],
        "exponents": good[:LENGTH_BYTES] + bytes(40) + good[LENGTH_BYTES + 40 :],
        "foreign": _with_exponents(good, zstandard.compress(bytes(9_999))),
        "empty": b"",
    }[damage]
    with pytest.raises(CorruptFrameError):
        codec_parts.decoded(Bf16Codec(), bad, len(raw))


def _with_exponents(good: bytes, exponents: bytes) -> bytes:
    """Replace the exponents. The length stays right, their number does not."""
    length = int.from_bytes(good[:LENGTH_BYTES], "little")
    others = good[LENGTH_BYTES + length :]
    return len(exponents).to_bytes(LENGTH_BYTES, "little") + exponents + others
