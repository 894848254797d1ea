"""Options of encrypted tiers, and sources of their keys. No option, message or ``repr`` contains a key."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tierkv.errors import ConfigError

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 4096
_HOW = (
    f"give {KEY_BYTES} random bytes as {2 * KEY_BYTES} hexadecimal digits (`openssl rand -hex {KEY_BYTES}`) or base64"
)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY_CHARS_MIN = 43
"""Characters of the shortest text of a key. A longer variable name is taken for a key in the wrong option."""


@dataclass(frozen=True, slots=True)
class AesGcmOptions:
    """Sources of the keys, and compression before encryption.

    Raises:
        ValueError: not exactly one of key_env and key_file is given, or a variable's name is invalid.
    """

    key_env: str | None = None
    """Environment variable that holds the key. Exclusive with key_file."""
    key_file: str | None = None
    """Path of the file that holds the key. Exclusive with key_env."""
    previous_key_env: tuple[str, ...] = ()
    """Variables with keys that encrypted frames which the tier holds already."""
    previous_key_file: tuple[str, ...] = ()
    """Files with keys that encrypted frames which the tier holds already."""
    inner: Literal["none", "zstd", "bf16"] = "none"
    """Codec that compresses payloads before encryption; encrypted bytes do not compress."""

    def __post_init__(self) -> None:
        if (self.key_env is None) == (self.key_file is None):
            raise ValueError(
                "give either key_env, the name of an environment variable that holds the key, or key_file, the path "
                "of a file that does"
            )
        for name in (*self.previous_key_env, *(() if self.key_env is None else (self.key_env,))):
            if len(name) >= _KEY_CHARS_MIN or not _VARIABLE.fullmatch(name):
                raise ValueError(
                    "key_env and previous_key_env take names of environment variables (letters, digits and _), "
                    "never a key itself"
                )

    def keys(self, environment: Mapping[str, str]) -> list[bytes]:
        """Read the key that encrypts, then those that only decrypt.

        Raises:
            ConfigError: a key is missing or invalid.
        """
        first = (
            read_key_env(self.key_env, environment) if self.key_env is not None else read_key_file(self.key_file or "")
        )
        more = [read_key_env(name, environment) for name in self.previous_key_env]
        return [first, *more, *map(read_key_file, self.previous_key_file)]


def read_key_env(name: str, environment: Mapping[str, str]) -> bytes:
    """Read the key in an environment variable.

    Raises:
        ConfigError: the variable is not set, or holds no key.
    """
    text = environment.get(name)
    if text is None:
        raise ConfigError(f"environment variable {name} is not set; {_HOW}")
    return _parse(text, f"environment variable {name}")


def read_key_file(path: str) -> bytes:
    """Read the key in a file: text as in a variable, or the 32 bytes themselves.

    Raises:
        ConfigError: the file cannot be read, is accessible to every user, or holds no key.
    """
    try:
        data = _read_private(path)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise ConfigError(f"key file {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) == KEY_BYTES:
        return data
    return _parse(data.decode("ascii", errors="replace"), f"key file {path}")


def _read_private(path: str) -> bytes:
    """Read a regular file that is closed to other users, up to the maximum length of a key file."""
    # Non-blocking: opening a pipe without a writer would wait forever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"key file {path} is not a regular file")
        if mode & stat.S_IRWXO:
            shown = f"{stat.S_IMODE(mode):04o}"
            raise ConfigError(f"key file {path} is open to every user (mode {shown}); run: chmod 600 {path}")
        return os.read(fd, KEY_FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)


def _parse(text: str, where: str) -> bytes:
    """Decode the text of a key. The text itself is never part of a message or of a chain of errors."""
    text = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        key = _decoded(text, decode)
        if len(key) == KEY_BYTES:
            if len(set(key)) == 1:
                raise ConfigError(f"{where} holds one byte {KEY_BYTES} times, which is not a key; {_HOW}")
            return key
    raise ConfigError(f"{where} holds no key of {KEY_BYTES} bytes (its text has {len(text)} characters); {_HOW}")


def _decoded(text: str, decode: Callable[[str], bytes]) -> bytes:
    try:
        return decode(text)
    except (ValueError, binascii.Error):
        return b""


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, altchars=b"-_" if set(text) & set("-_") else None, validate=True)
