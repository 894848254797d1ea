"""Run a command while a Ceph object gateway serves S3 on the loopback interface: ``radosgw.py FOLDER COMMAND...``.

One monitor, one object store daemon that keeps its data in memory, one gateway; no authentication inside the cluster.
The programs are those on the PATH. Otherwise Debian's packages are fetched into FOLDER and unpacked, not installed. The
command gets the server's address from TIERKV_TEST_OBJECT_URL, TIERKV_TEST_OBJECT_ENDPOINT and the AWS variables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import boto3
from running import free_port, listens, run, running

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIATIERKVTESTS00001", "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests"}
BUCKET = "tierkv-tests"
STORE_BYTES = 4 << 30
CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{port}]
public addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
run dir = {data}
admin socket = {data}/$name.asok
log file = {data}/$name.log
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
[mon.a]
mon data = {data}/mon
[osd.0]
osd data = {data}/osd
osd objectstore = memstore
memstore device bytes = {store_bytes}
[client.rgw]
# Whole objects in one piece: the second piece of an object is collected only hours after its deletion.
rgw max chunk size = 33554432
rgw obj stripe size = 33554432
rgw frontends = beast endpoint=127.0.0.1:{gateway_port}
"""


def fetch(folder: Path) -> Path:
    """Unpack Debian's packages with their dependencies beyond this system. Returns the root of their tree.

    Raises:
        RuntimeError: the system is not Debian, or its archive cannot be reached.
    """
    root = folder / "root"
    if (root / "usr/bin/radosgw").exists():
        return root
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    plan = _output(["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES])
    wanted = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _output(["apt-get", "download", *wanted], cwd=packages)
    unpacked = folder / f"root-{uuid.uuid4().hex}"
    for package in sorted(packages.glob("*.deb")):
        _output(["dpkg", "-x", str(package), str(unpacked)])
    unpacked.rename(root)
    return root


def _output(command: list[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} here: install radosgw, ceph-mon and ceph-osd") from None
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Programs:
    """Directory of Ceph's programs, and the environment that they need."""

    def __init__(self, folder: Path) -> None:
        installed = all(shutil.which(name) for name in ("radosgw", "ceph-mon", "ceph-osd", "ceph", "radosgw-admin"))
        root = Path("/") if installed else fetch(folder)
        (self.libraries,) = (path.parent for path in root.glob("usr/lib/*/rados-classes"))
        self.bin = root / "usr/bin"
        paths = [self.libraries, self.libraries / "ceph", root / "lib" / self.libraries.name]
        self.environment = {
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, paths)),
            "PYTHONPATH": str(root / "usr/lib/python3/dist-packages"),
        }

    def call(self, name: str, *arguments: str) -> str:
        """Run a program to its end. Returns its output."""
        # The command-line tool is Python, bound to Debian's own interpreter.
        interpreter = ["/usr/bin/python3"] if name == "ceph" else []
        environment = {**os.environ, **self.environment}
        return _output([*interpreter, str(self.bin / name), *arguments], env=environment)


@contextmanager
def cluster(folder: Path, data: Path) -> Iterator[str]:
    """Start a gateway. Yields its endpoint."""
    programs = Programs(folder)
    port, gateway_port, fsid = free_port(), free_port(), str(uuid.uuid4())
    for name in ("mon", "osd"):
        (data / name).mkdir()
    configuration = data / "ceph.conf"
    configuration.write_text(
        CONFIGURATION.format(
            fsid=fsid,
            port=port,
            gateway_port=gateway_port,
            data=data,
            libraries=programs.libraries,
            store_bytes=STORE_BYTES,
        )
    )
    conf = ("--conf", str(configuration))
    log, bin_, environment = data / "servers.log", programs.bin, programs.environment
    monmap = str(data / "monmap")
    programs.call("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{port}]", "--fsid", fsid, monmap)
    programs.call("ceph-mon", *conf, "-i", "a", "--mkfs", "--monmap", monmap)
    store = str(uuid.uuid4())
    with running([bin_ / "ceph-mon", *conf, "-i", "a", "-f"], log, lambda: listens(port), environment):
        programs.call("ceph", *conf, "--connect-timeout", "60", "osd", "new", store)
        programs.call("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", store)

        def is_up() -> bool:
            return json.loads(programs.call("ceph", *conf, "osd", "stat", "--format", "json"))["num_up_osds"] == 1

        with running([bin_ / "ceph-osd", *conf, "-i", "0", "-f"], log, is_up, environment):
            keys = ("--access-key", CREDENTIALS["AWS_ACCESS_KEY_ID"])
            keys += ("--secret-key", CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
            programs.call("radosgw-admin", *conf, "user", "create", "--uid", "tests", "--display-name", "tests", *keys)
            gateway = [bin_ / "radosgw", *conf, "--name", "client.rgw", "-f"]
            with running(gateway, log, lambda: listens(gateway_port), environment):
                yield f"http://127.0.0.1:{gateway_port}"


def main() -> int:
    """Start, run the command, stop."""
    folder, command = Path(sys.argv[1]).resolve(), sys.argv[2:]
    nobody = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}
    files = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    os.environ.update({**CREDENTIALS, **nobody, **files})
    with tempfile.TemporaryDirectory(prefix="tierkv-radosgw-") as data, cluster(folder, Path(data)) as endpoint:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=BUCKET)
        return run(command, {"TIERKV_TEST_OBJECT_URL": f"s3://{BUCKET}", "TIERKV_TEST_OBJECT_ENDPOINT": endpoint})


if __name__ == "__main__":
    sys.exit(main())
