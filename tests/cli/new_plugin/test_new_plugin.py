"""``tierkv new-plugin``: what it writes passes the conformance kit, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tierkv.cli.main import cli
from tierkv.cli.new_plugin import rendered
from tierkv.cli.new_plugin.rendering import LAYOUTS, check_name
from tierkv.errors import ConfigError

FEWER = """
from tierkv.testing.conformance.kit import KitBase

KitBase.crash_rounds, KitBase.many_frames, KitBase.model_examples, KitBase.model_steps = 1, 50, 2, 10
"""
"""Fewer rounds than an author runs: every test of the kit, in a fraction of the time."""


def run(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(cli, ["new-plugin", *arguments], catch_exceptions=False)


def installed(folder: Path, into: Path) -> Path:
    """Build the wheel of a distribution, and unpack it: an installation without a network."""
    wheels = into / "wheels"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into / "site")
    return into / "site"


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_what_is_written_passes_the_kit_at_once(tmp_path: Path, kind: str) -> None:
    """An author starts from green: the generated distribution is built, installed, and passes every test of the kit."""
    done = run("first-try", "--kind", kind, "--into", str(tmp_path))
    assert done.exit_code == 0, done.output
    folder = tmp_path / "tierkv-first-try"
    site = installed(folder, tmp_path / "installed")
    (folder / "tests/conftest.py").write_text(FEWER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "error", "tests"]
    kit = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert kit.returncode == 0, kit.stdout[-4000:] + kit.stderr[-1000:]
    assert " passed" in kit.stdout
    assert "declares no at_rest" not in kit.stdout, "tools find the namespaces, so the kit tests that"
    listed = [sys.executable, "-P", "-m", "tierkv.cli.main", "plugins", "--json"]
    assert "first-try" in subprocess.run(listed, env=environment, capture_output=True, text=True, check=True).stdout
    place = f'path = "{tmp_path}/new/place"\ncapacity = "1MiB"' if kind == "local" else 'url = "http://127.0.0.1:9/a"'
    stack = tmp_path / "stack.toml"
    stack.write_text(f'[host]\ncapacity = "1MiB"\n[[tiers]]\nbackend = "first-try"\n{place}\n', encoding="utf-8")
    for verb, said in (
        ("check", f"{tmp_path} can be written to" if kind == "local" else "refused"),
        ("ls", "first-try"),
    ):
        told = [sys.executable, "-P", "-m", "tierkv.cli.main", verb, str(stack), "--json"]
        done_there = subprocess.run(told, env=environment, capture_output=True, text=True, check=False)
        assert said in done_there.stdout, done_there.stderr
        assert "Traceback" not in done_there.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Store", "lower-case"),
        ("2fast", "lower-case"),
        ("a--b", "single '-'"),
        ("store-", "single '-'"),
        ("../store", "lower-case"),
        ("x" * 33, "at most 32"),
        ("tierkv-store", "leave the tierkv- out"),
        ("class", "a word of Python"),
        ("host", "the host tier's name"),
    ],
)
def test_a_bad_name_is_refused_with_a_good_one(tmp_path: Path, name: str, words: str) -> None:
    """The name becomes a folder, a package, a class and a word in configurations: it must fit all of them."""
    done = run(name, "--into", str(tmp_path))
    assert done.exit_code == 2
    assert words in done.output
    assert repr(name) in done.output
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Two distributions with one backend: the second would not load. The message names the first one."""
    with pytest.raises(ConfigError, match="tierkv-disk has a backend of this name"):
        check_name("disk", {"disk": "tierkv-disk"})
    with pytest.raises(ConfigError, match="tierkv-lmdb of this project has a backend of this name"):
        check_name("lmdb", {})  # not installed here, but may be where the new one is used


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_an_existing_folder_is_refused_by_name(tmp_path: Path, what: str) -> None:
    """Nothing that exists is changed, also not through a link to nowhere."""
    folder = tmp_path / "tierkv-store"
    if what == "folder":
        folder.mkdir()
    elif what == "file":
        folder.write_text("mine", encoding="utf-8")
    else:
        folder.symlink_to(tmp_path / "nowhere")
    done = run("store", "--into", str(tmp_path))
    assert done.exit_code == 2
    assert "tierkv-store exists already" in " ".join(done.output.split())
    assert what != "file" or folder.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in place of the parent: the message has the path and the option, and no traceback."""
    (tmp_path / "parent").write_text("", encoding="utf-8")
    done = run("store", "--into", str(tmp_path / "parent" / "below"))
    assert done.exit_code == 2
    assert "--into" in done.output


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_placeholder_is_left(kind: str) -> None:
    """Every word between signs is replaced, in paths and in texts, and all of it is Python that compiles."""
    files = rendered("my-store", kind)  # type: ignore[arg-type]  # the keys of LAYOUTS are the kinds
    for path, text in files.items():
        for word in ("@NAME@", "@PACKAGE@", "@CLASS@", "@SPI@", "@CORE@"):
            assert word not in f"{path}{text}"
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    assert any("class MyStoreBackend" in text for text in files.values())


def test_help_has_examples() -> None:
    """A user who forgot the syntax finds whole commands."""
    assert "tierkv new-plugin my-store --kind remote" in run("--help").output
