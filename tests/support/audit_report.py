"""Report of pip-audit, as a verdict: known vulnerabilities, or a word that no database answered.

As a program: ``python audit_report.py REPORT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def judge(packages: list[dict[str, Any]]) -> tuple[list[str], str]:
    """Known vulnerabilities, and a warning if packages were not checked."""
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    if len(skipped) == len(packages):
        return found, "no database of vulnerabilities answers here: nothing was checked"
    return found, f"not checked: {', '.join(skipped)}" if skipped else ""


def main(report: str) -> None:
    """Print the warning.

    Raises:
        SystemExit: a locked version has a known vulnerability.
    """
    path = Path(report)
    packages = json.loads(path.read_text(encoding="utf-8"))["dependencies"] if path.is_file() else []
    found, warning = judge(packages)
    if warning:
        sys.stderr.write(f"{warning}\n")
    if found:
        raise SystemExit("; ".join(found))


if __name__ == "__main__":
    main(sys.argv[1])
