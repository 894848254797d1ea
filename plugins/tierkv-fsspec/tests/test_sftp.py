"""SFTP: a real server on the loopback interface, with keys, directories to be created, and no conditions."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import asyncssh
import pytest
from fsspec_raw import ObjectFiles
from fsspec_support import check, get, key, object_name, open_at, put

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv_fsspec import FsspecOptions

FRAME = bytes(range(256)) * 200


@dataclass(frozen=True, slots=True)
class SftpServer:
    """Serve ``root`` to any client with the key."""

    root: Path
    port: int
    key_file: Path

    def url(self, place: str) -> str:
        """URL of a path below the root."""
        return f"sftp://engine@127.0.0.1:{self.port}/{place}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Accept only the test's key: no agent, and no key of the user who runs the tests."""
        return {"key_filename": str(self.key_file), "allow_agent": False, "look_for_keys": False}


@pytest.fixture(scope="session")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    """One server for all tests of this module."""
    folder = tmp_path_factory.mktemp("sftp")
    root = folder / "root"
    root.mkdir()
    mine, key_file, allowed = asyncssh.generate_private_key("ssh-ed25519"), folder / "key", folder / "allowed"
    mine.write_private_key(str(key_file))
    mine.write_public_key(str(allowed))
    program = Path(__file__).parent / "servers/sftp.py"
    command = [sys.executable, str(program), str(root), str(allowed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield SftpServer(root, int(process.stdout.readline()), key_file)
        process.communicate(timeout=30)


@pytest.fixture(scope="class")
def sftp_of_class(request: pytest.FixtureRequest, sftp: SftpServer) -> None:
    """Server for the kit, which makes options without fixtures."""
    request.cls.server = sftp


@pytest.mark.usefixtures("sftp_of_class")
class TestSftp(BackendConformance):
    """Conformance. Every place is a directory of the server."""

    plugin = tierkv_fsspec.PLUGIN
    local_place = False
    raw_live = True
    many_frames = 30
    model_examples = 2
    model_steps = 15
    crash_rounds = 1
    server: ClassVar[SftpServer]

    def make_options(self, place: Path) -> FsspecOptions:
        url = self.server.url(str(place).strip("/"))
        return FsspecOptions(url=url, storage_options=self.server.storage_options)

    def raw(self, place: Path, context: BackendContext) -> ObjectFiles:
        return ObjectFiles(self.server.root / str(place).strip("/") / context.namespace.fingerprint().hex())


def test_frames_appear_whole(sftp: SftpServer) -> None:
    """A partial file must not be a chunk: it is written under another name and moved; no file remains there."""
    place = uuid.uuid4().hex
    backend = open_at(sftp.url(place), storage_options=sftp.storage_options)
    moved: list[tuple[str, str, bytes]] = []
    file_system = backend._store.present._fs
    move = file_system.mv

    def noting(old: str, new: str) -> None:
        content = (sftp.root / old.strip("/")).read_bytes()
        assert not (sftp.root / new.strip("/")).exists()
        move(old, new)  # fails the first time, when the directory does not exist yet
        moved.append((old, new, content))

    file_system.mv = noting
    put(backend, {key(1): FRAME})
    ((old, new, content),) = moved
    assert "/tmp/" in old
    assert new.endswith(object_name(key(1)))
    assert content == FRAME
    assert list((sftp.root / place).glob("*/tmp/*")) == []
    backend.close()


def test_threads_have_connections_of_their_own(sftp: SftpServer) -> None:
    """Its library hangs when two threads share a connection; batches of several calls still run at once."""
    backend = open_at(sftp.url(uuid.uuid4().hex), storage_options=sftp.storage_options, concurrent_requests=4)
    keys = [key(number) for number in range(24)]
    put(backend, dict.fromkeys(keys, FRAME))
    wrong: list[object] = []

    def read() -> None:
        wrong.extend(frame for frame in get(backend, *keys) if frame != FRAME)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    backend.close()


def test_check(sftp: SftpServer) -> None:
    """A good path is reported as good, and an absent server by name."""
    found = check(sftp.url(uuid.uuid4().hex), storage_options=sftp.storage_options)
    assert all(check_result.ok for check_result in found.values()), found
    nowhere = check("sftp://engine@127.0.0.1:9/x", storage_options=sftp.storage_options)
    assert not nowhere["access"].ok


@pytest.mark.parametrize("which", ["another key", "a locked key", "no key"])
def test_wrong_credentials_are_no_outage(sftp: SftpServer, tmp_path: Path, which: str) -> None:
    """The server is there: an operator who reads of an outage would look at the network."""
    file = tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(
        str(file), passphrase="hush" if which == "a locked key" else None
    )
    login = sftp.storage_options | {"key_filename": str(file)}
    if which == "no key":
        del login["key_filename"]
    found = check(sftp.url("x"), storage_options=login)["access"]
    assert not found.ok
    assert found.detail.startswith("the credentials are wrong (")
    assert "key_filename" in found.fix


def test_a_key_file_that_is_absent_is_named(sftp: SftpServer, tmp_path: Path) -> None:
    """A typing error in its path is the most common mistake."""
    login = sftp.storage_options | {"key_filename": str(tmp_path / "absent")}
    found = check(sftp.url("x"), storage_options=login)["access"]
    assert not found.ok
    assert str(tmp_path / "absent") in found.detail
    assert "correct the path" in found.fix


def test_password_in_the_url_is_refused() -> None:
    """A user in the URL is an address; a password is a secret that would be logged."""
    assert FsspecOptions(url="sftp://engine@host:22/x").location.bucket == "engine@host:22"
    with pytest.raises(ValueError, match="no credentials in URLs") as failure:
        FsspecOptions(url="sftp://engine:hush-hush@host/x")
    assert "hush" not in str(failure.value)
