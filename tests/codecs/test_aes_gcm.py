"""Encryption: concealed data, bound data, and keys that read it."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from codec_parts import KEY, aes, decoded, encoded, frame_of, opened_frame
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.abc import CODEC_NOTES_BYTES, CodecFrame
from tierkv.codecs.aes_gcm import INNER_CODES
from tierkv.errors import CorruptFrameError, UnreadableFrameError

PLAIN = b"THE QUICK BROWN FOX " * 500
NOISE = random.Random(3).randbytes(len(PLAIN))
OTHER_KEY = bytes(range(100, 132))
INNERS = sorted(INNER_CODES)


def sealed(plain: bytes = PLAIN, inner: str = "none", key: bytes = KEY) -> tuple[bytes, CodecFrame]:
    """Return the stored bytes and the frame argument."""
    frame = frame_of()
    stored = encoded(aes(key, inner=inner), plain, frame)
    assert stored is not None
    return stored, frame


@pytest.mark.parametrize("plain", [PLAIN, NOISE], ids=["shrinks", "noise"])
@pytest.mark.parametrize("inner", INNERS)
def test_no_part_of_the_payload_is_visible(plain: bytes, inner: str) -> None:
    """Also if the inner codec declines. The checksum is concealed too: it would confirm a guess."""
    stored, frame = sealed(plain, inner)
    at_rest = stored + bytes(frame.notes)
    assert len(stored) <= len(plain)
    assert all(plain[start : start + 8] not in at_rest for start in range(0, len(plain) - 8, 8))
    assert bytes(frame.raw_checksum) not in at_rest


def test_one_payload_is_never_encrypted_alike_twice() -> None:
    """With a repeated nonce, the difference of two payloads could be computed."""
    seen = [sealed() for _ in range(50)]
    assert len({stored for stored, _ in seen}) == 50
    assert len({bytes(frame.notes[10:22]) for _, frame in seen}) == 50


@pytest.mark.parametrize(("inner", "shrinks"), [("none", False), ("bf16", True), ("zstd", True)])
def test_the_inner_codec_shortens_the_stored_payload(inner: str, shrinks: bool) -> None:
    """Ciphertext does not compress: compression works before encryption only."""
    stored, frame = sealed(PLAIN, inner)
    assert (len(stored) < len(PLAIN)) == shrinks
    assert frame.notes[1] == INNER_CODES[inner if shrinks else "none"]


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("configured", INNERS)
def test_any_inner_codec_is_read_with_any(inner: str, configured: str) -> None:
    """The notes name the inner codec, whatever is configured now. The checksum is restored."""
    stored, frame = sealed(PLAIN, inner)
    back = opened_frame(frame)
    assert decoded(aes(inner=configured), stored, len(PLAIN), back) == PLAIN
    assert bytes(back.raw_checksum) == bytes(frame.raw_checksum)


def test_the_format_matches_its_page() -> None:
    """Decrypted with the library's one-shot call and the documented offsets: others can write a reader."""
    stored, frame = sealed()
    notes = bytes(frame.notes)
    bound = frame.identity + notes[:10]
    plain = AESGCM(KEY).decrypt(notes[10:22], notes[22:38] + stored + notes[38:54], bound)
    assert plain == bytes(frame.raw_checksum) + PLAIN
    assert notes[:2] == b"\2\0"
    assert notes[54:] == bytes(10)


def test_a_frame_under_another_identity_is_refused() -> None:
    """An attacker with write access, but no key, must not be able to serve chunks of another prompt."""
    stored, frame = sealed()
    with pytest.raises(CorruptFrameError, match="does not match its authentication tag"):
        decoded(aes(), stored, len(PLAIN), opened_frame(frame, b"another frame"))


@settings(max_examples=200)
@given(place=st.integers(0, CODEC_NOTES_BYTES + len(PLAIN) - 1), bit=st.integers(0, 7))
def test_any_changed_bit_is_refused(place: int, bit: int) -> None:
    """All bytes at rest are bound to each other."""
    stored, frame = sealed()
    at_rest = bytearray(bytes(frame.notes) + stored)
    at_rest[place] ^= 1 << bit
    changed = CodecFrame(frame.identity, memoryview(at_rest)[:CODEC_NOTES_BYTES], memoryview(bytearray(16)))
    with pytest.raises(CorruptFrameError):
        decoded(aes(), bytes(at_rest[CODEC_NOTES_BYTES:]), len(PLAIN), changed)


@pytest.mark.parametrize("place", range(CODEC_NOTES_BYTES))
def test_any_changed_bit_of_the_notes_is_refused(place: int) -> None:
    """Also of the unused ones: a frame has exactly one form."""
    stored, frame = sealed()
    for bit in range(8):
        notes = bytearray(frame.notes)
        notes[place] ^= 1 << bit
        with pytest.raises(CorruptFrameError):
            decoded(aes(), stored, len(PLAIN), CodecFrame(frame.identity, memoryview(notes), memoryview(bytearray(16))))


def test_a_frame_of_the_first_notes_is_refused() -> None:
    """They did not bind the marks of a frame: to read them would let an attacker choose the weaker form."""
    stored, frame = sealed()
    frame.notes[0] = 1
    with pytest.raises(CorruptFrameError, match="unknown version"):
        decoded(aes(), stored, len(PLAIN), opened_frame(frame))


def test_unauthenticated_bytes_are_erased() -> None:
    """The library returns bytes before it verifies the tag."""
    stored, frame = sealed()
    out = bytearray(len(PLAIN))
    changed = stored[:-1] + bytes([stored[-1] ^ 1])
    with pytest.raises(CorruptFrameError):
        aes().decode(memoryview(changed), memoryview(out), opened_frame(frame))
    assert out == bytes(len(PLAIN))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("length", [0, 1, len(PLAIN) - 1, len(PLAIN) + 1])
def test_a_wrong_length_is_refused(inner: str, length: int) -> None:
    """Also with a valid tag: the framework binds the raw length, and the codec must not rely on that."""
    stored, frame = sealed(PLAIN, inner)
    with pytest.raises(CorruptFrameError):
        decoded(aes(), stored, length, opened_frame(frame))


@settings(max_examples=100)
@given(
    stored=st.binary(max_size=200),
    notes=st.one_of(
        st.binary(min_size=CODEC_NOTES_BYTES, max_size=CODEC_NOTES_BYTES),
        st.binary(min_size=44, max_size=44).map(lambda rest: bytes(sealed(b"x")[1].notes[:10]) + rest + bytes(10)),
    ),
    raw_bytes=st.integers(0, 300),
)
def test_random_bytes_are_refused(stored: bytes, notes: bytes, raw_bytes: int) -> None:
    """Only CorruptFrameError may be raised, whatever the bytes."""
    frame = CodecFrame(b"a frame", memoryview(notes), memoryview(bytearray(16)))
    with pytest.raises(CorruptFrameError):
        decoded(aes(), stored, raw_bytes, frame)


def test_a_wrong_key_is_unreadable_not_corrupt() -> None:
    """A wrong key in the configuration must not delete a whole tier as corrupt: the right key will read it."""
    stored, frame = sealed()
    with pytest.raises(UnreadableFrameError, match="previous_key_env or previous_key_file") as caught:
        decoded(aes(OTHER_KEY), stored, len(PLAIN), opened_frame(frame))
    assert KEY.hex()[:8] not in str(caught.value)


def test_old_frames_are_read_after_a_rotation() -> None:
    """New frames use the new key; frames of the old key stay readable."""
    stored, frame = sealed()
    rotated = aes(OTHER_KEY, KEY)
    assert decoded(rotated, stored, len(PLAIN), opened_frame(frame)) == PLAIN
    newer = frame_of()
    again = encoded(rotated, PLAIN, newer)
    assert again is not None
    assert decoded(aes(OTHER_KEY), again, len(PLAIN), opened_frame(newer)) == PLAIN


def test_a_forged_key_id_does_not_make_a_key() -> None:
    """The tag reveals a frame of a foreign key under a known key's id."""
    stored, frame = sealed(key=OTHER_KEY)
    frame.notes[2:10] = sealed()[1].notes[2:10]
    with pytest.raises(CorruptFrameError, match="does not match its authentication tag"):
        decoded(aes(), stored, len(PLAIN), opened_frame(frame))


def test_a_codec_does_not_show_its_key() -> None:
    """A repr may appear in logs and tracebacks that users share."""
    codec = aes(OTHER_KEY, KEY)
    shown = repr(codec) + str(codec)
    assert not any(key.hex() in shown or repr(key) in shown for key in (KEY, OTHER_KEY))


def test_without_the_library_the_error_says_what_to_install() -> None:
    """The library is an extra; the error of a stack that needs it must name the package to install."""
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from tierkv.codecs.builtin import CODEC_PLUGINS\n"
        "from tierkv.abc import CodecContext\n"
        "from tierkv.errors import PluginError\n"
        "plugin = CODEC_PLUGINS[-1]\n"
        "try:\n    plugin.open(None, plugin.options(key_env='HOME'))\n"
        "except PluginError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert "pip install 'cryptography>=44'" in done.stdout, done.stderr
