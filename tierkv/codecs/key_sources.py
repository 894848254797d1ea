"""Options of encrypted tiers, and where their keys come from. A key is in no option, no message and no ``repr``."""

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
"""Characters of the shortest text of a key. No variable has a name that long, and who writes one mistook the option."""


@dataclass(frozen=True, slots=True)
class AesGcmOptions:
    """Where keys are, and what is done before encryption.

    key_env, key_file: name of the environment variable, or path of the file, that holds the key. One of them.
    previous_key_env, previous_key_file: more of them, for keys that wrote what lies in the tier.
    inner: codec that shortens payloads before they are encrypted; afterwards nothing would.
    """

    key_env: str | None = None
    key_file: str | None = None
    previous_key_env: tuple[str, ...] = ()
    previous_key_file: tuple[str, ...] = ()
    inner: Literal["none", "zstd", "bf16"] = "none"

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
        """The key that encrypts, then those that only decrypt.

        Raises:
            ConfigError: one of them cannot be had.
        """
        first = (
            read_key_env(self.key_env, environment) if self.key_env is not None else read_key_file(self.key_file or "")
        )
        more = [read_key_env(name, environment) for name in self.previous_key_env]
        return [first, *more, *map(read_key_file, self.previous_key_file)]


def read_key_env(name: str, environment: Mapping[str, str]) -> bytes:
    """The key in an environment variable.

    Raises:
        ConfigError: it is not set, or holds no key.
    """
    text = environment.get(name)
    if text is None:
        raise ConfigError(f"environment variable {name} is not set; {_HOW}")
    return _parse(text, f"environment variable {name}")


def read_key_file(path: str) -> bytes:
    """The key in a file: text as in a variable, or the bytes themselves.

    Raises:
        ConfigError: it cannot be read, may be read or changed by everybody, or holds no key.
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
    """The content of a regular file that not everybody may open; no more of it than a key can have."""
    # Non-blocking: opening a pipe that nobody writes to would wait forever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"key file {path} is no regular file")
        if mode & stat.S_IRWXO:
            shown = f"{stat.S_IMODE(mode):04o}"
            raise ConfigError(f"key file {path} is open to every user (mode {shown}); run: chmod 600 {path}")
        return os.read(fd, KEY_FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)


def _parse(text: str, where: str) -> bytes:
    """The bytes that the text stands for. The text itself never gets into a message, nor into a chain of errors."""
    text = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        key = _decoded(text, decode)
        if len(key) == KEY_BYTES:
            if len(set(key)) == 1:
                raise ConfigError(f"{where} holds one byte {KEY_BYTES} times, which is no key; {_HOW}")
            return key
    raise ConfigError(f"{where} holds no key of {KEY_BYTES} bytes (its text has {len(text)} characters); {_HOW}")


def _decoded(text: str, decode: Callable[[str], bytes]) -> bytes:
    try:
        return decode(text)
    except (ValueError, binascii.Error):
        return b""


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, altchars=b"-_" if set(text) & set("-_") else None, validate=True)
