"""Files shipped beside the code: the default stack and the pages of the documentation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from tierkv.config import default_mapping, load_config, load_default, parse_config
from tierkv.config.describing import model_of
from tierkv.config.schema import StackConfig


def test_the_default_stack_lies_under_the_directory_given(tmp_path: Path) -> None:
    """The demo must write to the given directory, and nowhere else."""
    stack = load_default(tmp_path)
    assert [tier.backend for tier in stack.tiers] == ["disk", "fsspec"]
    assert stack.tiers[0].options["path"] == f"{tmp_path}/disk"
    assert stack.tiers[1].options["url"] == f"file://{tmp_path}/objects"
    assert "{workdir}" not in repr(stack)


def test_a_directory_of_any_name_will_do() -> None:
    """A quote, a backslash or a brace in a path must not become syntax."""
    workdir = '/tmp/it"s {odd}\\n'
    assert load_default(workdir).tiers[0].options["path"] == f"{workdir}/disk"


def test_the_default_stack_can_be_changed(tmp_path: Path) -> None:
    """The demo replaces the object store by a real one when asked."""
    mapping = default_mapping(tmp_path)
    mapping["tiers"][1]["url"] = "s3://bucket/prefix"
    assert parse_config(mapping).tiers[1].options["url"] == "s3://bucket/prefix"


def test_the_default_stack_is_in_the_wheel(tmp_path: Path, root: Path) -> None:
    """An installed tierkv has no checkout to read it from."""
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel")
    (built,) = hatchling.WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    listing = subprocess.run([sys.executable, "-m", "zipfile", "-l", built], capture_output=True, text=True, check=True)
    assert "tierkv/config/default_stack.toml" in listing.stdout


@pytest.fixture
def sections() -> list[type[BaseModel]]:
    """Classes of all sections of a stack's description."""
    found: list[type[BaseModel]] = [StackConfig]
    found += [model for field in StackConfig.model_fields.values() if (model := model_of(field.annotation))]
    assert len(found) == 12
    return found


def test_every_key_is_used(sections: list[type[BaseModel]], root: Path) -> None:
    """A key that nothing reads is accepted, documented, and does nothing."""
    paths = [path for path in (root / "tierkv").rglob("*.py") if "schema" not in path.stem]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {f"{section.__name__}.{name}" for section in sections for name in section.model_fields}
    unused = sorted(key for key in keys if key.partition(".")[2] not in read)
    assert not unused, f"no module of tierkv reads {', '.join(unused)}: hand the value on, as tier_factory.py does"


def test_every_key_is_explained(sections: list[type[BaseModel]]) -> None:
    """A key without a description, or a duration without a unit, is a gap in the page."""
    for section in sections:
        for name, field in section.model_fields.items():
            if model_of(field.annotation) is None:
                assert field.description, f"{section.__name__}.{name} has no description"
                assert name.endswith("_s") == ("econds" in field.description), f"{section.__name__}.{name}"


def test_the_how_to_shows_a_stack_that_loads(tmp_path: Path, root: Path) -> None:
    """A copied example of the page must give a stack, in each of its syntaxes."""
    page = (root / "docs" / "how-to" / "write-a-stack.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(toml|yaml)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert {language for language, _ in blocks} == {"toml", "yaml"}
    for index, (language, text) in enumerate(blocks):
        path = tmp_path / f"{index}.{language}"
        path.write_text(text, encoding="utf-8")
        assert load_config(path).host.capacity > 0
