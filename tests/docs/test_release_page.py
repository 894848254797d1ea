"""The checklist of a release: every distribution, every check, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from session_names import nox_sessions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/release.md").read_text(encoding="utf-8")
DISTRIBUTIONS = {"tierkv", *(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))}
SHORT_ON_PURPOSE = {
    "demo",
    "format",
    "gemma",
    "lint",
    "types",
    "layers",
    "lmcache",
    "oldest",
    "tests",
    "conformance",
    "fuzz",
    "vllm",
    "vllm-ab",
}
"""Sessions that ``.ci/run`` has run before, and those that measure or rewrite."""


def sessions_named() -> set[str]:
    """Sessions behind ``nox -s``, in blocks and in sentences."""
    found: set[str] = set()
    for words in re.findall(r"nox -s ([\w -]+?)(?: --|`|\n)", PAGE):
        found |= set(words.split())
    return found


def test_it_names_every_distribution() -> None:
    """A plugin that is forgotten leaves the extras of the core without their wheel."""
    assert {name for name in DISTRIBUTIONS if f"`{name}`" in PAGE} == DISTRIBUTIONS


def test_its_sessions_exist() -> None:
    """A checklist with a dead command is skipped from there on."""
    assert sessions_named() <= nox_sessions()
    assert {"build", "changelog", "lock", "generate"} <= sessions_named()


def test_it_leaves_no_session_out() -> None:
    """A new session that takes long belongs here: ``.ci/run`` does not run it."""
    assert nox_sessions() - sessions_named() - SHORT_ON_PURPOSE == set()


def test_its_files_exist() -> None:
    """Each step names the file to change."""
    paths = re.findall(r"`((?:tests|tierkv|plugins|docs)/[\w/.*]+)`", PAGE)
    assert paths
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]


def test_contributors_find_it() -> None:
    """The page is one click from the guide for contributors."""
    assert "docs/how-to/release.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
