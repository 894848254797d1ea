"""Extras of the core: each names what it promises, in versions that fit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from tierkv import _version
from tierkv.integrations.vllm.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = {"disk": "tierkv-disk", "lmdb": "tierkv-lmdb", "object": "tierkv-fsspec", "valkey": "tierkv-valkey"}


def project(folder: Path) -> dict[str, Any]:
    """Metadata of a distribution."""
    metadata: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return metadata


EXTRAS: dict[str, list[str]] = project(ROOT)["optional-dependencies"]


def test_an_extra_pins_the_backend_that_was_released_with_it() -> None:
    """Their tests ran together. A version that is not built would also send pip to an index for another one."""
    for extra, name in BACKENDS.items():
        (requirement,) = EXTRAS[extra]
        assert re.sub(r"\[.*\]", "", requirement) == f"{name}=={project(ROOT / 'plugins' / name)['version']}"


def test_every_plugin_accepts_this_core() -> None:
    """A circle of requirements that excludes itself cannot be installed."""
    major, minor = _version.__version__.split(".")[:2]
    wanted = f"tierkv>={major}.{minor},<{major}.{int(minor) + 1}"
    for folder in ROOT.glob("plugins/*/pyproject.toml"):
        assert wanted in project(folder.parent)["dependencies"], folder


def test_every_backend_has_an_extra() -> None:
    """``tierkv-example`` is there to be read."""
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert plugins - {"tierkv-example"} == set(BACKENDS.values())


def test_all_has_every_extra_but_engines_and_tools() -> None:
    """Installed beside an engine, it must not replace the engine's torch."""
    (requirement,) = EXTRAS["all"]
    named = set(re.fullmatch(r"tierkv\[(.*)\]", requirement)[1].split(","))  # type: ignore[index]
    assert named == EXTRAS.keys() - {"all", "torch", "transformers", "vllm", "testing"}


def test_the_object_extra_brings_a_client_for_buckets() -> None:
    """The package fsspec alone serves files; a bucket needs one of the packages of tierkv-fsspec."""
    (requirement,) = EXTRAS["object"]
    client = re.search(r"\[(\w+)\]", requirement)
    assert client
    assert client[1] in project(ROOT / "plugins/tierkv-fsspec")["optional-dependencies"]


def test_the_vllm_extra_is_the_supported_range() -> None:
    """Otherwise pip would install a vLLM that the adapter refuses."""
    first, last = (tuple(map(int, version.split("."))) for version in (SUPPORTED[0], SUPPORTED[-1]))
    assert EXTRAS["vllm"] == [f"vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"]
