"""A disk that has less room than the tier's capacity: it takes what fits, and new frames replace old ones for good.

Each test runs in a process of its own, with a small real file system that only this process sees.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD_TIMEOUT_S = 240.0
MIB = 1 << 20

PROLOGUE = """
import os, resource, shutil, sys, time
from pathlib import Path
import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.errors import OutOfSpaceError
from tierkv.testing.frames import make_frame, make_key
from tierkv.testing.conformance.session import Session
from disk_support import PAGE, frames, make_namespace

FRAME, MIB = PAGE, 1 << 20
mount = Path(sys.argv[1])

def opened(segment_bytes=256 * MIB, capacity=64 * MIB):
    context = BackendContext("disk", make_namespace(), FRAME, capacity)
    options = tierkv_disk.DiskOptions(
        str(mount / "tier"), min_free_bytes=0, segment_bytes=segment_bytes, durability="none"
    )
    return Session(tierkv_disk.PLUGIN, context, options)

def frame(number):
    return frames(number, size=FRAME)

def fill(disk, first=0):
    number = first
    while (result := disk.write(frame(number))) == [None]:
        number += 1
    assert isinstance(result[0], OutOfSpaceError), result
    return list(range(first, number))

def replace(disk, stored, count, first):
    for number in range(first, first + count):
        assert disk.delete([make_key(stored.pop(0))]) == [None]
        assert disk.write(frame(number)) == [None], f"write {number - first} was refused"
        stored.append(number)
    for number in stored:
        assert disk.get(make_key(number)) == frame(number)[make_key(number)]

def take_everything(path):
    with path.open("wb", buffering=0) as file:
        for size in (64 * 1024, PAGE):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
"""


def run_on_small_disk(code: str, mount_point: Path, *, mib: int) -> None:
    """Run Python code after ``PROLOGUE``, with a file system of ``mib`` MiB for that process alone."""
    alone = ["unshare", "--map-root-user", "--mount"]
    mount = f'mount -t tmpfs -o size={mib}m tmpfs "$0"'
    allowed = subprocess.run([*alone, "sh", "-c", mount, mount_point], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"may not mount here: {allowed.stderr.decode()}")
    path = [str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path[:0] = {path!r}\n{PROLOGUE}{code}"
    command = [*alone, "sh", "-c", f'{mount} && exec "$@"', str(mount_point), sys.executable, "-B", "-I", "-c", program]
    done = subprocess.run(
        [*command, str(mount_point)], capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("segment_bytes", [MIB, 256 * MIB], ids=["small segments", "one segment"])
def test_new_frames_replace_old_ones_for_good(tmp_path: Path, segment_bytes: int) -> None:
    """The log needs room to grow and to be compacted; a disk filled to the last byte once ended all writes."""
    code = f"""
with opened({segment_bytes}) as disk:
    stored = fill(disk)
    assert len(stored) * FRAME > 5 * MIB // 2, "far less is kept than there is room for"
    replace(disk, stored, 9000, 1000)
with opened({segment_bytes}) as disk:
    assert disk.backend.recovery.lossless, disk.backend.recovery.losses()
    assert disk.scan().keys() == set(map(make_key, stored))
    replace(disk, stored, 100, 20000)
"""
    run_on_small_disk(code, tmp_path, mib=6)


def test_a_limit_that_free_bytes_do_not_show(tmp_path: Path) -> None:
    """With a quota the file system reports more free bytes than the user may take: the tier tries smaller segments."""
    code = """
from types import SimpleNamespace
shutil.disk_usage = lambda path: SimpleNamespace(total=1 << 40, used=0, free=1 << 40)
with opened() as disk:
    stored = fill(disk)
    assert len(stored) * FRAME > MIB, "far less is kept than there is room for"
    replace(disk, stored, 9000, 1000)
"""
    run_on_small_disk(code, tmp_path, mib=6)


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """A process that may not write long files gets shorter segments, instead of none."""
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
with opened(capacity=8 * MIB) as disk:
    assert len(fill(disk)) * FRAME == 8 * MIB
"""
    run_on_small_disk(code, tmp_path, mib=32)


def test_another_program_fills_the_disk(tmp_path: Path) -> None:
    """Writes continue within seconds after the other program has removed its files, without a new open."""
    code = """
with opened() as disk:
    stored = fill(disk)
    take_everything(mount / "other")
    refused = number = 0
    while not refused and number < 20000:
        disk.delete([make_key(stored[0])])
        refused = disk.write(frame(stored[0])) != [None]
        number += 1
    assert refused, "the log should have run out of room"
    (mount / "other").unlink()
    until = time.monotonic() + 30
    while disk.delete([make_key(stored[1])]) != [None] or disk.write(frame(5000)) != [None]:
        assert time.monotonic() < until, "the tier does not write again"
        time.sleep(0.05)
"""
    run_on_small_disk(code, tmp_path, mib=6)


def test_a_full_disk_is_opened_with_room_for_the_log(tmp_path: Path) -> None:
    """A tier that finds no free byte gives some of its own back at open, and can write again."""
    code = """
with opened() as disk:
    stored = fill(disk)
take_everything(mount / "other")
with opened() as disk:
    kept = [number for number in stored if disk.get(make_key(number)) is not None]
    assert len(kept) > len(stored) // 4
    replace(disk, kept, 9000, 1000)
"""
    run_on_small_disk(code, tmp_path, mib=6)


def test_a_disk_without_inodes_is_opened(tmp_path: Path) -> None:
    """Other programs' small files took the last inode, and the engine started again: its chunks were not served."""
    code = """
import subprocess
with opened(segment_bytes=MIB) as disk:
    stored = [number for number in range(200) if disk.write(frame(number)) == [None]]
used = os.statvfs(mount).f_files - os.statvfs(mount).f_ffree
subprocess.run(["mount", "-o", f"remount,nr_inodes={used}", mount], check=True)
try:
    (mount / "other").touch()
except OSError:
    pass
else:
    raise AssertionError("there is an inode left")
with opened(segment_bytes=MIB) as disk:
    assert disk.scan().keys() == set(map(make_key, stored))
    replace(disk, stored, 500, 1000)
"""
    run_on_small_disk(code, tmp_path, mib=16)


REPLACED = """
import subprocess
from disk_support import frames

def call(*command):
    subprocess.run([*command, mount], check=True)

def write_until(condition, number):
    give_up_s = time.monotonic() + 30
    while not condition(disk.write(frame(number))[0]):
        assert time.monotonic() < give_up_s, disk.write(frame(number))
        time.sleep(0.02)

call("chmod", "777")
disk = opened(segment_bytes=MIB)
assert disk.write(frame(1)) == [None]
"""


def test_a_file_system_that_was_replaced_is_used(tmp_path: Path) -> None:
    """A drive is changed under a running engine. While none is mounted, the file system below must not fill up."""
    run_on_small_disk(
        REPLACED
        + """
call("umount", "-l")
write_until(lambda result: result is not None, 2)
assert not list(mount.iterdir()), "chunks fill the file system below"
assert disk.get(make_key(1)) == frame(1)[make_key(1)], "open files are read all the same"
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
write_until(lambda result: result is None, 2)
assert disk.get(make_key(1)) is None
assert disk.get(make_key(2)) == frame(2)[make_key(2)]
disk.close()
with opened(segment_bytes=MIB) as again:
    assert list(again.scan()) == [make_key(2)]
""",
        tmp_path,
        mib=16,
    )


def test_a_file_system_that_was_hidden_for_a_while_has_its_chunks(tmp_path: Path) -> None:
    """Another one was mounted over it by mistake, and unmounted."""
    run_on_small_disk(
        REPLACED
        + """
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
write_until(lambda result: disk.get(make_key(1)) is None, 2)
assert disk.write(frame(3)) == [None]
call("umount", "-l")
write_until(lambda result: disk.get(make_key(3)) is None, 4)
assert disk.get(make_key(4)) == frame(4)[make_key(4)]
assert disk.get(make_key(1)) == frame(1)[make_key(1)]
""",
        tmp_path,
        mib=16,
    )
