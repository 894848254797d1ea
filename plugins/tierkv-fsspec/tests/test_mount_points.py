"""Directories below a mount point, whose file system goes away while the tier is open."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fsspec_support import CHILD_TIMEOUT_S, get, key, open_at, put

CODE = """
import subprocess, sys
from pathlib import Path
from fsspec_support import get, key, open_at, put

place, frame = Path(sys.argv[1]), bytes(range(256)) * 200

def call(*command):
    subprocess.run([*command, place], check=True)

def stored(number):
    return put(backend, {key(number): frame})[0] is None

backend = open_at(f"file://{place}/kv")
assert stored(1)
call("umount", "-l")
refused = put(backend, {key(2): frame})[0]
assert "is not mounted: mount it again" in str(refused), refused
assert not list(place.iterdir()), "objects fill the file system below"
assert get(backend, key(1)) == [None], "a miss"
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
assert stored(3)
assert get(backend, key(1), key(3)) == [None, frame]
subprocess.run(["rm", "-r", place / "kv"], check=True)
assert stored(4)
backend.close()
"""


def test_a_file_system_that_is_not_mounted_is_waited_for(tmp_path: Path) -> None:
    """A network share is unmounted, and a drive mounted in its place. Writes before that would fill the root disk."""
    alone = ["unshare", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=16m tmpfs "$0"'
    allowed = subprocess.run([*alone, "sh", "-c", mount, tmp_path], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"may not mount here: {allowed.stderr.decode()}")
    program = f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n{CODE}"
    command = [*alone, "sh", "-c", f'{mount} && chmod 700 "$0" && exec "$@"', str(tmp_path), sys.executable, "-I", "-c"]
    done = subprocess.run(
        [*command, program, str(tmp_path)], capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_link_to_another_file_system_is_followed(tmp_path: Path) -> None:
    """A share is replaced by the change of a link: both are mounted, so the directory is made in the new one."""
    link, first = tmp_path / "share", tmp_path / "first"
    first.mkdir(mode=0o700)
    link.symlink_to(first)
    backend = open_at(f"file://{link}/kv")
    assert put(backend, {key(1): b"x" * 4096}) == [None]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as second:
        link.unlink()
        link.symlink_to(second)
        assert put(backend, {key(2): b"y" * 4096}) == [None]
        assert get(backend, key(1), key(2)) == [None, b"y" * 4096]
    backend.close()
