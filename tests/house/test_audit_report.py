"""The session ``audit`` fails for a known vulnerability, and never passes in silence where nothing was checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from audit_report import main

CHECKED = {"name": "good", "version": "1", "vulns": []}
SKIPPED = {"name": "other", "skip_reason": "no answer"}


def run(tmp_path: Path, *packages: object) -> None:
    """Judge a report of these packages."""
    (tmp_path / "report").write_text(json.dumps({"dependencies": packages}), encoding="utf-8")
    main(str(tmp_path / "report"))


def test_a_vulnerability_ends_the_session(tmp_path: Path) -> None:
    """The message names the version and the entry."""
    with pytest.raises(SystemExit, match="bad 2: CVE-1"):
        run(tmp_path, CHECKED, {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1"}]})


def test_what_was_not_checked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a database the session says so; with an answer for some, it names the others."""
    run(tmp_path, SKIPPED)
    main(str(tmp_path / "absent"))
    assert capsys.readouterr().err.count("nothing was checked") == 2
    run(tmp_path, SKIPPED, CHECKED)
    assert "not checked: other" in capsys.readouterr().err
    run(tmp_path, CHECKED)
    assert not capsys.readouterr().err
