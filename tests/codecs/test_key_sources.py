"""Sources of keys, and the errors if there is no key."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tierkv.codecs.key_sources import AesGcmOptions, read_key_env, read_key_file
from tierkv.errors import ConfigError

KEY = bytes(range(7, 39))


def key_file(place: Path, content: bytes, mode: int = 0o600) -> str:
    """Write a file with a key."""
    path = place / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


TEXTS = [
    KEY.hex(),
    KEY.hex().upper(),
    f"  {KEY.hex()}\n",
    base64.b64encode(KEY).decode(),
    base64.urlsafe_b64encode(KEY).decode(),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_key_as_text(tmp_path: Path, text: str) -> None:
    """In the forms of common tools, in a variable or in a file."""
    assert read_key_env("KEY", {"KEY": text}) == KEY
    assert read_key_file(key_file(tmp_path, text.encode())) == KEY


def test_a_key_as_bytes(tmp_path: Path) -> None:
    """As `head -c 32 /dev/urandom` writes it, whatever the bytes."""
    for key in (KEY, b"\xff\0 \n" * 8, b"0123456789abcdef" * 2):
        assert read_key_file(key_file(tmp_path, key)) == key


@pytest.mark.parametrize("text", ["", "secret-passphrase", KEY.hex()[:-2], KEY.hex() + "00", "zz" * 32, "é" * 64])
def test_other_texts_are_refused(tmp_path: Path, text: str) -> None:
    """A passphrase is not a key: it is easy to guess. The message names source and fix, and never the text."""
    for read in (
        lambda: read_key_env("MY_KEY", {"MY_KEY": text}),
        lambda: read_key_file(key_file(tmp_path, text.encode())),
    ):
        with pytest.raises(ConfigError, match=r"holds no key of 32 bytes .*openssl rand -hex 32") as caught:
            read()
        assert not text or text not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("text", ["00" * 32, "ff" * 32])
def test_a_placeholder_is_refused(text: str) -> None:
    """A value copied from a template would be the same for all users."""
    with pytest.raises(ConfigError, match="one byte 32 times"):
        read_key_env("KEY", {"KEY": text})


def test_an_unset_variable_is_refused() -> None:
    """The most frequent mistake."""
    with pytest.raises(ConfigError, match="environment variable MY_KEY is not set; give 32 random bytes"):
        read_key_env("MY_KEY", {})


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o602, 0o644, 0o777])
def test_a_file_that_is_open_to_all_users_is_refused(tmp_path: Path, mode: int) -> None:
    """A key that every user of the machine can read protects nothing from them."""
    path = key_file(tmp_path, KEY, mode)
    with pytest.raises(ConfigError, match=rf"open to every user \(mode {mode:04o}\); run: chmod 600 {path}"):
        read_key_file(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_of_a_group_is_accepted(tmp_path: Path, mode: int) -> None:
    """Clusters give secrets to a group on purpose."""
    assert read_key_file(key_file(tmp_path, KEY, mode)) == KEY


def test_other_files_are_refused(tmp_path: Path) -> None:
    """None of them may hang or fill the memory."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir()
    for name, says in (
        ("pipe", "not a regular file"),
        ("folder", "cannot be read: Is a dir|not a regular file"),
        ("absent", "cannot be read: No such"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_key_file(str(tmp_path / name))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file("nul\0")
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    huge.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(str(huge))


def test_the_first_key_encrypts(tmp_path: Path) -> None:
    """The option decides which key encrypts, not the order in the file."""
    other, third = bytes(range(50, 82)), bytes(range(90, 122))
    path = key_file(tmp_path, KEY)
    environment = {"A": other.hex(), "B": third.hex()}
    assert AesGcmOptions(key_file=path, previous_key_env=("B", "A")).keys(environment) == [KEY, third, other]
    assert AesGcmOptions(key_env="A", previous_key_file=(path,)).keys(environment) == [other, KEY]


@pytest.mark.parametrize("options", [{}, {"key_env": "A", "key_file": "/x"}])
def test_exactly_one_key_encrypts(options: dict[str, str]) -> None:
    """Neither none nor two."""
    with pytest.raises(ValueError, match="either key_env, the name of an environment variable"):
        AesGcmOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [KEY.hex(), "a" * 64, base64.b64encode(KEY).decode(), "MY KEY", "1KEY", ""])
def test_a_key_in_place_of_a_name_is_refused(name: str) -> None:
    """The error does not repeat the key."""
    with pytest.raises(ValueError, match="never a key itself") as caught:
        AesGcmOptions(key_env=name)
    assert not name or name not in str(caught.value)
    with pytest.raises(ValueError, match="never a key itself"):
        AesGcmOptions(key_env="A", previous_key_env=(name,))
