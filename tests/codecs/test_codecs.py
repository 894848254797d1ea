"""Rules of all codecs that ship with tierkv."""

from __future__ import annotations

import random
import threading

import pytest
import zstandard
from codec_parts import aes, decoded, encoded, frame_of, open_codec, opened_frame
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.codecs.builtin import CODEC_PLUGINS
from tierkv.codecs.none import NoneCodec
from tierkv.codecs.zstd import ZstdCodec, ZstdOptions
from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import CODEC_BYTES_MAX, NO_CODEC

# Random bytes, runs and their mix: what shrinks, what does not, and what is in between.
payloads = st.lists(
    st.one_of(
        st.binary(max_size=200), st.builds(lambda b, n: bytes([b]) * n, st.integers(0, 255), st.integers(0, 9000))
    ),
    max_size=8,
).map(b"".join)


LOSSLESS = {
    **{name: open_codec(name) for name in ("none", "zstd", "bf16")},
    **{f"aes, {inner} inside": aes(inner=inner) for inner in ("none", "zstd", "bf16")},
}


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60)
@given(raw=payloads)
def test_round_trip(name: str, raw: bytes) -> None:
    """A codec restores every byte, and declines payloads that it does not shorten.

    A codec that conceals accepts all payloads and lengthens none.
    """
    codec, frame, hides = LOSSLESS[name], frame_of(), name.startswith("aes")
    stored = encoded(codec, raw, frame)
    if stored is None:
        assert not hides
        return
    assert hides or 0 < len(stored) < len(raw)
    assert decoded(codec, stored, len(raw), opened_frame(frame)) == raw


def test_all_of_them_are_tested() -> None:
    """A new codec must be covered by the tests of this folder."""
    tested = {name.partition(",")[0].replace("aes", "aes-256-gcm") for name in LOSSLESS} | {"fp8", "int8"}
    assert tested == {plugin.name for plugin in CODEC_PLUGINS}
    assert {plugin.name for plugin in CODEC_PLUGINS if plugin.lossy} == {"fp8", "int8"}
    assert {plugin.name for plugin in CODEC_PLUGINS if plugin.conceals} == {"aes-256-gcm"}


@pytest.mark.parametrize("level", [1, 3, 22])
def test_any_level_is_read_with_any(level: int) -> None:
    """Changing the level must not make a tier unreadable."""
    raw = b"key value " * 1000
    stored = encoded(open_codec("zstd", level=level), raw)
    assert stored is not None
    assert decoded(open_codec("zstd", level=4 - min(level, 3)), stored, len(raw)) == raw


@pytest.mark.parametrize("level", [0, 23, -1])
def test_an_unknown_level_is_refused(level: int) -> None:
    """The library would clamp it silently."""
    with pytest.raises(ValueError, match=f"level = {level} is not one of 1 to 22"):
        ZstdOptions(level=level)


def test_zstd_shrinks_compressible_bytes() -> None:
    """Otherwise the round trip above would pass for a codec that always declines."""
    raw = b"key value " * 10_000
    written = encoded(ZstdCodec(), raw)
    assert written is not None
    assert len(written) < len(raw) // 10


def test_zstd_declines_random_bytes() -> None:
    """A stored form longer than raw would not fit the slot, and would only cost time."""
    raw = random.Random(1).randbytes(100_000)
    assert encoded(ZstdCodec(), raw) is None


def test_none_declines() -> None:
    """Its frames are raw, and are read in place."""
    assert encoded(NoneCodec(), b"abc") is None


def test_none_decodes_an_exact_copy_only() -> None:
    """The interface requires every codec to refuse a wrong length."""
    out = bytearray(3)
    NoneCodec().decode(memoryview(b"abc"), memoryview(out), frame_of())
    assert out == b"abc"
    with pytest.raises(CorruptFrameError):
        NoneCodec().decode(memoryview(b"ab"), memoryview(out), frame_of())


@pytest.mark.parametrize("length", [0, 999, 1001])
def test_zstd_decode_requires_the_exact_length(length: int) -> None:
    """A frame with a wrong declared length must not leave old bytes at the end of the slot."""
    stored = zstandard.compress(b"a" * 1000)
    with pytest.raises(CorruptFrameError, match="1000"):
        decoded(ZstdCodec(), stored, length)


@given(cut=st.integers(0, 60))
def test_zstd_decode_refuses_truncated_data(cut: int) -> None:
    """Half a zstd frame is invalid."""
    stored = zstandard.compress(random.Random(2).randbytes(64) * 40)
    with pytest.raises(CorruptFrameError):
        decoded(ZstdCodec(), stored[:cut], 64 * 40)


@given(junk=st.binary(max_size=300))
def test_zstd_decode_survives_random_bytes(junk: bytes) -> None:
    """The library's own errors must not escape: tiers expect CorruptFrameError."""
    with pytest.raises(CorruptFrameError):
        decoded(ZstdCodec(), junk, 1000)


def test_zstd_allocates_no_more_memory_than_the_payload() -> None:
    """A frame of a kilobyte may declare a window of gigabytes, which the library would allocate first."""
    magic, sizes_follow, window_of_2_gib = b"\x28\xb5\x2f\xfd", b"\xc0", bytes([(31 - 10) << 3])
    stored = magic + sizes_follow + window_of_2_gib + (1000).to_bytes(8, "little") + b"\x43\x1f\x00a"
    with pytest.raises(CorruptFrameError, match="window of 2147483648"):
        decoded(ZstdCodec(), stored, 1000)
    small = magic + sizes_follow + bytes([0]) + (1000).to_bytes(8, "little") + b"\x43\x1f\x00a"
    assert decoded(ZstdCodec(), small, 1000) == b"a" * 1000


@pytest.mark.parametrize("level", [1, 3, 9, 19, 22])
@pytest.mark.parametrize("raw_bytes", [1, 2, 100, 1023, 1024, 1025, 70_000, 3_000_001])
def test_windows_of_every_level_are_accepted(level: int, raw_bytes: int) -> None:
    """The windows that each level writes are within the bound."""
    raw = (b"window " * (raw_bytes // 7 + 1))[:raw_bytes]
    stored = encoded(open_codec("zstd", level=level), raw)
    assert stored is None or decoded(ZstdCodec(), stored, raw_bytes) == raw
    assert (stored is None) == (raw_bytes < 100)


def test_zstd_without_content_size_is_refused() -> None:
    """A foreign frame that declares no length could have any."""
    stored = zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 1000)
    with pytest.raises(CorruptFrameError):
        decoded(ZstdCodec(), stored, 1000)


def test_zstd_contexts_are_per_thread() -> None:
    """A context used by two threads at once corrupts data. A context per call costs more than the compression."""
    made: list[int] = []

    def make() -> zstandard.ZstdCompressor:
        made.append(threading.get_ident())
        return zstandard.ZstdCompressor(level=1, write_content_size=True)

    codec = ZstdCodec(compressor=make)
    errors: list[str] = []

    def work(seed: int) -> None:
        raw = random.Random(seed).randbytes(300) * 400
        for _ in range(20):
            out, back = memoryview(bytearray(len(raw))), bytearray(len(raw))
            written = codec.encode(memoryview(raw), out, frame_of())
            codec.decode(out[: written or 0], memoryview(back), frame_of())
            if back != raw:
                errors.append("different bytes came back")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(made) == 3


def test_names_fit_a_header() -> None:
    """A name that is too long would otherwise fail at the first store, in production."""
    names = [plugin.name for plugin in CODEC_PLUGINS]
    assert names[0] == NO_CODEC
    assert all(name.isascii() and len(name) <= CODEC_BYTES_MAX for name in names)
