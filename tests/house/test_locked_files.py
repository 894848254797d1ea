"""The lock names what the sessions install, and a file that it does not name is found."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from locked_files import main, strangers

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
GOOD = "a" * 64
UNLOCKED = {"tierkv", "torch", "vllm"}
"""First words of the names of our own distributions, and of engines' parts that the sessions install otherwise."""


def item(name: str, sha256: str | None) -> dict[str, Any]:
    """A row of pip's report: of an archive, or of a folder, which has no hash."""
    source: dict[str, Any] = {"url": f"https://index/{name}-1.0-py3-none-any.whl"}
    source |= {"archive_info": {"hashes": {"sha256": sha256}}} if sha256 else {"dir_info": {}}
    return {"metadata": {"name": name}, "download_info": source}


def test_a_file_without_a_known_hash_is_named() -> None:
    """A folder has no hash; torch's builds differ between indexes."""
    rows = [item("known", GOOD), item("folder", None), item("torch", "b" * 64), item("swapped", "c" * 64)]
    lock = f"known==1.0 \\\n    --hash=sha256:{GOOD}\n"
    assert strangers({"install": rows}, lock) == ["swapped-1.0-py3-none-any.whl"]


def test_the_check_ends_a_session(tmp_path: Path) -> None:
    """Nox stops at the exit status; the message says how to go on."""
    (tmp_path / "lock").write_text("", encoding="utf-8")
    (tmp_path / "report").write_text('{"install": []}', encoding="utf-8")
    main(str(tmp_path / "lock"), str(tmp_path / "report"))
    row = '{"metadata": {"name": "x"}, "download_info": {"url": "u/x.whl", "archive_info": {}}}'
    (tmp_path / "report").write_text(f'{{"install": [{row}]}}', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"x\.whl.*nox -s lock"):
        main(str(tmp_path / "lock"), str(tmp_path / "report"))


def test_the_lock_names_every_requirement() -> None:
    """Of the core, its extras and groups, and of each plugin. No torch, vLLM or part of this repository is in it."""
    locked = {normal(name) for name in re.findall(r"^([\w.-]+)==", LOCK, flags=re.MULTILINE)}
    lines: list[str] = []
    for path in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        project = document["project"]
        lines += project["dependencies"]
        for extra in (project.get("optional-dependencies", {}), document.get("dependency-groups", {})):
            lines += [line for group in extra.values() for line in group]
    wanted = {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}
    assert {name for name in wanted if name.partition("-")[0] not in UNLOCKED} <= locked
    assert not {name for name in locked if name.partition("-")[0] in UNLOCKED}
    assert all("--hash=sha256:" in block for block in re.split(r"\n(?=\w)", LOCK)[1:])


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
