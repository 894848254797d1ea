"""AES-256 in Galois counter mode: without the key, payloads at rest can neither be read nor changed undetected.

The configuration names keys and never contains them. A key is in an environment variable or a file, as 64 hexadecimal
digits or in base64; a file may also hold the 32 bytes themselves.

Stored form: the payload, or its shorter form by the inner codec, encrypted, with the same length. The frame's notes
hold the rest:

====== ===== ==================================================================================
offset bytes meaning
====== ===== ==================================================================================
     0     1 version of these notes: 2
     1     1 inner codec: 0 none, 1 zstd, 2 bf16
     2     8 id of the key: BLAKE2b of ``tierkv key id``, keyed with the key
    10    12 nonce, random
    22    16 raw checksum, encrypted before the payload in the same stream
    38    16 tag
    54    10 zero
====== ===== ==================================================================================

Namespace, key, raw length, codec, marks and number of parts of the frame, and the first ten bytes of the notes, are
associated data. Notes of version 1, which no release wrote, did not bind the marks and the number of parts: such frames
are refused. Random nonces are safe for 2**32 frames per key: the probability that any two are equal is below 2**-32.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from tierkv.abc.codec import Codec, CodecFrame
from tierkv.errors import CorruptFrameError, UnreadableFrameError

NONCE_BYTES = 12
_VERSION = 2
_KEY_ID = slice(2, 10)
_NONCE = slice(10, 22)
_CHECKSUM = slice(22, 38)
_TAG = slice(38, 54)
_BOUND = slice(10)
_END = slice(54, None)
INNER_CODES: Mapping[str, int] = {"none": 0, "zstd": 1, "bf16": 2}


class AesGcmCodec:
    """Encrypting codec. May be called on any number of threads; the work runs without the GIL.

    Args:
        keys: 32 bytes each. The first encrypts; each decrypts the frames that it encrypted.
        inner: name of the codec that is tried before encryption.
        codecs: codecs that may have been used before encryption, by name.
    """

    def __init__(self, keys: Sequence[bytes], inner: str, codecs: Mapping[str, Codec]) -> None:
        self._keys = {_id_of(key): AES(key) for key in keys}
        self._key_id = _id_of(keys[0])
        self._inner = INNER_CODES[inner]
        self._codecs = {INNER_CODES[name]: codec for name, codec in codecs.items()}
        self._scratch = _Scratch()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int:
        """Encrypt a payload. Never declines."""
        inner, body = self._shorter(raw, frame)
        notes, nonce = frame.notes, os.urandom(NONCE_BYTES)
        notes[_BOUND] = bytes((_VERSION, inner)) + self._key_id
        cipher = Cipher(self._keys[self._key_id], GCM(nonce)).encryptor()
        notes[_NONCE] = nonce
        notes[_CHECKSUM] = self._crypt(cipher, body, out[: len(body)], frame, bytes(frame.raw_checksum))
        cipher.finalize()
        notes[_TAG] = cipher.tag
        return len(body)

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        """Decrypt a payload.

        Raises:
            CorruptFrameError: payload, notes or identity of the frame were changed.
            UnreadableFrameError: the key of the frame is not configured.
        """
        notes = bytes(frame.notes)
        version, inner, key = notes[0], notes[1], self._keys.get(notes[_KEY_ID])
        if version != _VERSION or (inner and inner not in self._codecs) or any(notes[_END]):
            raise CorruptFrameError("the notes of an encrypted frame have an unknown version or inner codec")
        if key is None:
            raise UnreadableFrameError(
                f"frame is encrypted with key {notes[_KEY_ID].hex()}, which is not configured; name it in "
                "previous_key_env or previous_key_file"
            )
        codec = self._codecs[inner] if inner else None
        if len(stored) > len(out) or (codec is None and len(stored) != len(out)):
            raise CorruptFrameError(f"encrypted data of {len(stored)} bytes does not hold a payload of {len(out)}")
        body = out if codec is None else self._scratch.room(len(stored))
        cipher = Cipher(key, GCM(notes[_NONCE], notes[_TAG])).decryptor()
        origin = self._crypt(cipher, stored, body, frame, notes[_CHECKSUM])
        try:
            cipher.finalize()
        except InvalidTag:
            out[:] = bytes(len(out))  # unauthenticated plaintext must not remain in the slot
            raise CorruptFrameError("an encrypted frame does not match its authentication tag") from None
        frame.raw_checksum[:] = origin
        if codec is not None:
            codec.decode(body.toreadonly(), out, frame)

    def _shorter(self, raw: memoryview, frame: CodecFrame) -> tuple[int, memoryview]:
        """Return the code of the inner codec that was used, and the bytes to encrypt."""
        if not self._inner:
            return 0, raw
        room = self._scratch.room(len(raw))
        written = self._codecs[self._inner].encode(raw, room, frame)
        return (0, raw) if written is None else (self._inner, room[:written])

    @staticmethod
    def _crypt(
        cipher: AEADEncryptionContext | AEADDecryptionContext,
        source: memoryview,
        target: memoryview,
        frame: CodecFrame,
        checksum: bytes,
    ) -> bytes:
        """Encrypt or decrypt the checksum, then the body. Returns the checksum."""
        cipher.authenticate_additional_data(frame.identity + bytes(frame.notes[_BOUND]))
        turned: bytes = cipher.update(checksum)
        cipher.update_into(source, target)
        return turned


def _id_of(key: bytes) -> bytes:
    return hashlib.blake2b(b"tierkv key id", key=key, digest_size=_KEY_ID.stop - _KEY_ID.start).digest()


class _Scratch(threading.local):
    """Buffer of one thread for the inner codec."""

    def __init__(self) -> None:
        self._room = bytearray()

    def room(self, length: int) -> memoryview:
        if len(self._room) < length:
            self._room = bytearray(length)
        return memoryview(self._room)[:length]
