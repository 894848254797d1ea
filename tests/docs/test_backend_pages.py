"""The page of each backend lists the options that the backend has, as the installed plugin declares them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import backends
import pytest

from tierkv.config.options import describe_options
from tierkv.config.units import parse_size
from tierkv.plugins.loading import load_plugins

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["Install", "A stack", "Options", "Declares and passes", "Limits", "Another backend is better"]
SOURCES = {
    name: (found[1], found[2])
    for path in (ROOT / "docs/reference/backends").glob("*.md")
    for found in re.finditer(r"<!-- options: (\S+) (\S+) -->", path.read_text(encoding="utf-8"))
    for name in [found[2].removesuffix("Options").lower().replace("reader", "-read-only")]
}
"""Backend to file and class of its options, from the pages."""


def test_every_distribution_has_its_page() -> None:
    """A backend without a page is found by those who know of it already."""
    names = {path.name.removeprefix("tierkv-") for path in ROOT.glob("plugins/tierkv-*")}
    assert {path.stem for path in (ROOT / "docs/reference/backends").glob("*.md")} == names | {"index"}
    index = (ROOT / "docs/reference/backends/index.md").read_text(encoding="utf-8")
    assert all(f"[`{name}`]({name}.md)" in index for name in names)


@pytest.mark.parametrize("name", backends.PAGES)
def test_a_page_has_its_sections_and_tables(name: str) -> None:
    """Readers compare backends section by section."""
    text = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == SECTIONS
    assert text.count("| option | value | default | meaning |") >= 1
    assert text.count("| capability | declared |") >= 1


@pytest.mark.parametrize("backend", SOURCES)
def test_the_table_has_the_options_of_the_plugin(backend: str) -> None:
    """Names, required ones and defaults are those of the objects that a stack is opened with."""
    plugins = load_plugins().backends
    if backend not in plugins:
        pytest.skip(f"{backend} is not installed")
    path, name = SOURCES[backend]
    written = backends.options_of(ROOT / path, name)
    declared = describe_options(plugins[backend].plugin)
    assert [one.name for one in written] == [one.name for one in declared]
    for ours, theirs in zip(written, declared, strict=True):
        assert (ours.default is backends.REQUIRED) == theirs.required, ours.name
        if not theirs.required:
            assert (ours.default or None) == (theirs.default or None), ours.name


@pytest.mark.parametrize("backend", SOURCES)
def test_the_readme_of_a_distribution_has_the_options_and_their_defaults(backend: str) -> None:
    """A README is read where the pages are not: in the folder, and in the index of packages."""
    plugins = load_plugins().backends
    if backend not in plugins:
        pytest.skip(f"{backend} is not installed")
    folder = ROOT / "plugins" / f"tierkv-{backend.removesuffix('-read-only')}"
    text = (folder / "README.md").read_text(encoding="utf-8")
    (tables,) = re.findall(r"^## Options\n(.*?)^## ", text, flags=re.MULTILINE | re.DOTALL) or [""]
    of_backend = re.search(rf"^\| option of `{backend}` .*?(?=^$)", tables, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", of_backend[0] if of_backend else tables, flags=re.MULTILINE)
    written = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    declared = describe_options(plugins[backend].plugin)
    if not rows and backend == "example":  # its README points to the code, which is short
        return
    assert list(written) == [one.name for one in declared]
    for one in declared:
        wanted = "required" if one.required else "none" if one.default is None else one.default
        given = written[one.name].strip("`")
        value = given if given in {"required", "none"} else tomllib.loads(f"value = {given}")["value"]
        value = parse_size(value) if isinstance(wanted, int) and isinstance(value, str) else value
        assert wanted in (value, value or "none"), one.name


def test_an_option_without_a_text_is_refused(tmp_path: Path) -> None:
    """A row without a meaning would be a hole in the page."""
    source = tmp_path / "options.py"
    source.write_text('class Some:\n    path: str\n    size: int = 3\n    """Size."""\n', encoding="utf-8")
    with pytest.raises(ValueError, match="path has no text"):
        backends.options_of(source, "Some")


def test_an_outdated_table_is_replaced(tmp_path: Path) -> None:
    """The check that pages are current can fail: what is between the marks comes from the code."""
    page = tmp_path / "disk.md"
    page.write_text("# x\n<!-- capabilities: disk -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    made = backends.page(page)
    assert "old" not in made
    assert "| `durable` | yes |" in made
    assert made.endswith("<!-- end -->\nafter\n")
