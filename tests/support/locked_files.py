"""Files that pip installed, held against the lock: ``python locked_files.py requirements.lock report.json``.

pip checks hashes by itself only where it installs nothing from a folder, and the packages of this repository are
folders. So it installs exact versions, writes a report, and this looks at the hash of each file in it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

UNLOCKED = frozenset({"torch"})
"""Its build for a CPU comes from another index than its build for GPUs; constraints.txt names its version."""


def strangers(report: dict[str, Any], lock: str) -> list[str]:
    """Names of the files in pip's report that the lock has no hash of. What came from a folder is left out."""
    known = set(re.findall(r"--hash=sha256:(\w+)", lock))
    found = []
    for item in report["install"]:
        archive = item["download_info"].get("archive_info")
        if archive is None or item["metadata"]["name"] in UNLOCKED:
            continue
        if archive.get("hashes", {}).get("sha256") not in known:
            found.append(item["download_info"]["url"].rpartition("/")[2])
    return found


def main(lock: str, report: str) -> None:
    """Exit with the names of the strangers, if there are any."""
    installed = json.loads(Path(report).read_text(encoding="utf-8"))
    if names := strangers(installed, Path(lock).read_text(encoding="utf-8")):
        sys.exit(
            f"{lock} has no hash of {', '.join(names)}: renew it by `python -m nox -s lock`, or find out who sent them"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
