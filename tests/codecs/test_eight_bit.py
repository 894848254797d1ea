"""Fp8 and int8: bounds of the error, and refused payloads."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from codec_parts import decoded, encoded, namespace, open_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.abc import CodecContext
from tierkv.codecs.eight_bit import COLUMNS, ROWS, TILE
from tierkv.codecs.fp8 import CODE_MAX, Fp8Codes, open_fp8
from tierkv.codecs.int8 import open_int8
from tierkv.errors import ConfigError, CorruptFrameError

NAMES = ("fp8", "int8")
DTYPES = ("bfloat16", "float16", "float32")
EXPONENTS = {"bfloat16": (-126, 120), "float16": (-24, 14), "float32": (-126, 120)}
TINY = 2.0**-116
"""Errors that small are made in columns in which all magnitudes are: they have the scale of 2**-109."""

F32 = npt.NDArray[np.float32]


def to_bytes(values: F32, dtype: str) -> bytes:
    """Return values as bytes of a type."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def to_values(raw: bytes, dtype: str) -> F32:
    """Return bytes of a type as values."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype).astype(np.float32)


def largest_of_columns(values: F32) -> F32:
    """Return, for each value, the largest magnitude among those that share its scale.

    Computed independently of the codec.
    """
    found = np.zeros(len(values), np.float32)
    for start in range(0, len(values), TILE):
        tile = np.abs(values[start : start + TILE])
        columns = -(-len(tile) // ROWS)
        for column in range(columns):
            found[start + column : start + len(tile) : columns] = tile[column::columns].max(initial=0)
    return found


class Payload:
    """Values of a type. Not a dataclass, because Hypothesis would print all bytes."""

    def __init__(self, dtype: str, raw: bytes) -> None:
        self.dtype = dtype
        self.raw = raw

    def __repr__(self) -> str:
        return f"{len(self.raw)} bytes of {self.dtype}"


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """Draw a payload: channels of very different widths, zeros, and an odd length."""
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(40, 3000), st.just(TILE), st.just(TILE + 77)))
    low, high = EXPONENTS[dtype]
    middle, spread = draw(st.integers(low, high)), draw(st.integers(0, 30))
    exponents = np.clip(rng.integers(middle - spread, middle + spread + 1, count), low, high)
    values = np.ldexp(rng.uniform(-2, 2, count), exponents).astype(np.float32)
    values[rng.random(count) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0
    return Payload(dtype, to_bytes(values, dtype))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(payload=payloads())
def test_the_error_is_bounded(name: str, payload: Payload) -> None:
    """The documented bounds of lossy = true hold for every value."""
    dtype, raw = payload.dtype, payload.raw
    codec = open_codec(name, dtype)
    stored = encoded(codec, raw)
    assert stored is not None
    truth, found = to_values(raw, dtype), to_values(decoded(codec, stored, len(raw)), dtype)
    largest = largest_of_columns(truth).astype(np.float64)
    bound = largest / 127 if name == "int8" else np.maximum(np.abs(truth) / 16, largest / 2**16)
    smallest_step = 2.0**-25 if dtype == "float16" else TINY
    assert (np.abs(truth.astype(np.float64) - found) <= bound + smallest_step).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(payload=payloads())
def test_a_second_round_trip_changes_nothing(name: str, payload: Payload) -> None:
    """A chunk may be written and read many times: errors must not accumulate."""
    dtype, raw = payload.dtype, payload.raw
    codec = open_codec(name, dtype)
    first = encoded(codec, raw)
    assert first is not None
    back = decoded(codec, first, len(raw))
    second = encoded(codec, back)
    assert second is not None
    assert decoded(codec, second, len(raw)) == back


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_bit_pattern(name: str, dtype: str) -> None:
    """Every finite value of 16 bits, each in a column of its magnitude, including denormals and both zeros."""
    bits = np.arange(2**16, dtype=np.uint16)
    not_finite = (bits & 0x7F80) == 0x7F80 if dtype == "bfloat16" else (bits & 0x7C00) == 0x7C00
    magnitude = bits & 0x7FFF
    too_large = magnitude >= (0x7F7F - 7 if dtype == "bfloat16" else 0x7BC0)  # these round up to infinity
    usable = bits[~not_finite & ~too_large]
    raw = np.repeat(np.sort(usable), ROWS).reshape(-1, ROWS).T.reshape(-1)[: len(usable) * ROWS].tobytes()
    codec = open_codec(name, dtype)
    stored = encoded(codec, raw)
    assert stored is not None
    found = to_values(decoded(codec, stored, len(raw)), dtype)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, TILE - 1, TILE, TILE + 500])
def test_values_that_are_not_finite_are_stored_raw(name: str, dtype: str, poison: float, place: int) -> None:
    """No code represents them, and an infinity as a scale would make the whole column infinite."""
    values = np.ones(TILE + 501, np.float32)
    values[place] = poison
    assert encoded(open_codec(name, dtype), to_bytes(values, dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_that_round_to_an_infinity_are_stored_raw(name: str, dtype: str) -> None:
    """The largest value of a type rounds up to a power of two that the type cannot represent."""
    top = {"bfloat16": 3.3896e38, "float16": 65504.0, "float32": 3.4028e38}[dtype]
    values = np.full(TILE, 1.0, np.float32)
    values[7] = top
    assert encoded(open_codec(name, dtype), to_bytes(values, dtype)) is None
    values[7] = top / 1.2
    stored = encoded(open_codec(name, dtype), to_bytes(values, dtype))
    assert stored is not None
    back = to_values(decoded(open_codec(name, dtype), stored, len(to_bytes(values, dtype))), dtype)
    assert np.isfinite(back).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.5), ("float16", 0.5), ("float32", 0.25)])
def test_the_size_is_as_documented(name: str, dtype: str, share: float) -> None:
    """One byte per value, and one per 32 values: users plan the capacity of a tier with it."""
    raw = to_bytes(np.linspace(-3, 3, 5 * TILE + 123, dtype=np.float32), dtype)
    stored = encoded(open_codec(name, dtype), raw)
    assert stored is not None
    assert len(stored) == 5 * TILE + 123 + -(-(5 * TILE + 123) // ROWS)
    assert len(stored) / len(raw) == pytest.approx(share * 33 / 32, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_payloads_that_would_not_shrink_are_declined(name: str) -> None:
    """Two values need two codes and a scale. An empty payload needs nothing."""
    assert encoded(open_codec(name), b"") is None
    assert encoded(open_codec(name), b"\1") is None
    assert encoded(open_codec(name), b"\1\2") is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_after_the_last_value_are_restored(name: str, dtype: str) -> None:
    """No engine has such a payload, but a codec must not shift all values by a byte for it."""
    raw = to_bytes(np.linspace(-1, 1, 200, dtype=np.float32), dtype) + b"\xab"
    codec = open_codec(name, dtype)
    stored = encoded(codec, raw)
    assert stored is not None
    assert decoded(codec, stored, len(raw))[-1:] == b"\xab"


def nearest_e4m3(value: float) -> float:
    """Return the nearest value of the format, ties to even, by trying all codes of the specification."""
    best = (np.inf, 1, 0.0)
    for code in range(CODE_MAX + 1):
        exponent, mantissa = code >> 3, code & 7
        known = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        best = min(best, (abs(abs(value) - known), code & 1, known))
    return float(np.copysign(best[2], value))


@settings(max_examples=300)
@given(st.floats(-240, 240, width=32))
def test_fp8_codes_are_the_nearest(value: float) -> None:
    """The table, indexed by half of the bits, matches the definition of e4m3."""
    scaled, codes, back = np.array([value], np.float32), np.empty(1, np.uint8), np.empty(1, np.float32)
    Fp8Codes().quantise(scaled, codes)
    Fp8Codes().values(codes, back)
    assert float(back[0]) == nearest_e4m3(value)


def test_ties_between_fp8_codes_round_to_even() -> None:
    """Rounding always up or always down would shift the mean of all values."""
    known = np.array([1.0, 1.125, 1.25, 1.375, 1.5], np.float32)
    middles, codes, back = (known[:-1] + known[1:]) / 2, np.empty(4, np.uint8), np.empty(4, np.float32)
    Fp8Codes().quantise(middles.copy(), codes)
    Fp8Codes().values(codes, back)
    assert back.tolist() == [1.0, 1.25, 1.25, 1.5]


def test_a_channel_keeps_its_own_scale() -> None:
    """Columns rather than rows: one wide channel must not cost the others their bits."""
    values = np.tile(np.where(np.arange(128) == 5, 1000.0, 0.01), TILE // 128).astype(np.float32)
    raw = to_bytes(values, "float32")
    for name in NAMES:
        codec = open_codec(name, "float32")
        stored = encoded(codec, raw)
        assert stored is not None
        back = to_values(decoded(codec, stored, len(raw)), "float32")
        np.testing.assert_allclose(back, values, rtol=1 / 16)
    assert COLUMNS % 128 == 0


@pytest.mark.parametrize("make", [open_fp8, open_int8])
@pytest.mark.parametrize("dtype", ["float64", "fp8_e4m3", "uint8", "auto", ""])
def test_an_unsupported_dtype_is_refused_at_open(make: object, dtype: str) -> None:
    """Bytes decoded as another type would be noise with valid checksums."""
    with pytest.raises(ConfigError, match=f"type '{dtype}': it serves bfloat16, float16 and float32; choose another"):
        make(CodecContext(namespace(dtype)))  # type: ignore[operator]


@pytest.mark.parametrize("make", [open_fp8, open_int8])
@pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", "BFloat16", "half", "torch.float16", "fp32", "float"])
def test_other_names_of_known_types(make: object, dtype: str) -> None:
    """Engines use several names for one type."""
    make(CodecContext(namespace(dtype)))  # type: ignore[operator]


@pytest.mark.parametrize("make", [open_fp8, open_int8])
def test_pages_of_other_contents_are_refused(make: object) -> None:
    """Errors in a state accumulate over thousands of tokens.

    Half a value at the end of a page would shift all later ones.
    """
    with pytest.raises(ConfigError, match="group 0: states of SSM layers"):
        make(CodecContext(namespace(kind="ssm")))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"group 0: pages of \(4096, 33\) bytes do not hold whole values"):
        make(CodecContext(namespace(page_bytes=(4096, 33))))  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(stored=st.binary(max_size=300), raw_bytes=st.integers(0, 600))
def test_any_stored_bytes_are_values_or_corrupt(name: str, stored: bytes, raw_bytes: int) -> None:
    """No other error, no value that is not finite, and no allocation of a declared length."""
    try:
        back = decoded(open_codec(name, "float16"), stored, raw_bytes)
    except CorruptFrameError:
        return
    assert np.isfinite(np.frombuffer(back, np.float16, raw_bytes // 2)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["scale 0", "scale 255", "code", "longer", "shorter"])
def test_codes_that_encode_never_writes_are_corrupt(name: str, damage: str) -> None:
    """A code or scale outside its range was not written by this codec."""
    raw = to_bytes(np.linspace(-1, 1, 320, dtype=np.float32), "bfloat16")
    good = bytearray(encoded(open_codec(name), raw) or b"")
    if damage.startswith("scale"):
        good[3] = int(damage.split()[1])
    elif damage == "code":
        good[50] = 0x80 if name == "int8" else CODE_MAX + 1
    bad = {"longer": bytes(good) + b"x", "shorter": bytes(good[:-1])}.get(damage, bytes(good))
    with pytest.raises(CorruptFrameError):
        decoded(open_codec(name), bad, len(raw))


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_share_buffers(name: str) -> None:
    """Codecs are called on several threads at once."""
    codec, errors = open_codec(name), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        raw = to_bytes((rng.normal(size=3 * TILE) * 10.0**seed).astype(np.float32), "bfloat16")
        wanted = None
        for _ in range(10):
            stored = encoded(codec, raw)
            back = decoded(codec, stored or b"", len(raw))
            wanted = wanted or back
            if back != wanted:
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
