"""Building the real model: once, or not at all. What it is made of comes from PyPI; the session `gemma` does that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.models import gemma_model


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """As ``python -m benchmarks.models.gemma_model``."""
    monkeypatch.setattr(sys, "argv", ["gemma_model", *arguments])
    return gemma_model.main()


def test_a_model_that_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second run of the session would otherwise wait a minute for what it has."""
    monkeypatch.setattr(gemma_model, "_build", lambda *_: pytest.fail("built again"))
    assert run(monkeypatch, str(tmp_path)) == 0


def test_a_build_that_ends_early_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a model in the cache would be taken for a whole one by every later run."""

    def fail(source: Path, model: Path) -> None:
        model.mkdir()
        (model / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(gemma_model, "_build", fail)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, str(tmp_path / "cache" / "gemma"))
    assert not list((tmp_path / "cache").iterdir())


def test_a_model_that_was_built_is_in_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other file is kept; the command prints the terms that apply to the weights."""
    monkeypatch.setattr(gemma_model, "_build", lambda _, model: (model.mkdir(), (model / "config.json").touch()))
    assert run(monkeypatch, str(tmp_path / "cache" / "gemma")) == 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["gemma"]
    assert (tmp_path / "cache" / "gemma" / "config.json").is_file()
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().err


def test_it_wants_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a gigabyte must not go wherever the caller happens to be."""
    assert run(monkeypatch) == 2
    assert "FOLDER" in capsys.readouterr().err
