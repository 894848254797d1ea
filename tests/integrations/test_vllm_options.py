"""Options in the extra configuration of vLLM's connector, and supported versions of vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tierkv.integrations.vllm as adapter
from tierkv.errors import ConfigError, EngineVersionError
from tierkv.integrations.vllm.options import read_options
from tierkv.integrations.vllm.versions import SUPPORTED, check_version

STACK = {"host": {"capacity": "1MiB"}}


def test_a_description_inline() -> None:
    """One JSON argument on the command line is the shortest way to serve."""
    assert read_options({"tierkv": STACK}).host.capacity == 1 << 20


def test_the_path_of_a_description(tmp_path: Path) -> None:
    """An administrator writes one file, and every server reads it."""
    path = tmp_path / "stack.toml"
    path.write_text('[host]\ncapacity = "2MiB"\n')
    assert read_options({"tierkv": str(path)}).host.capacity == 2 << 20


def test_keys_of_the_engine_are_its_own() -> None:
    """The engine keeps keys of its own beside ours; only those that are named are let pass."""
    assert read_options({"tierkv": STACK, "spec_name": "TierKVSpec"}, known=["spec_name"]).host.capacity == 1 << 20


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["kv_connector_extra_config: tierkv", "missing", "stack.toml"]),
        ({"tierkw": STACK}, ["tierkw", "unknown key", "did you mean 'tierkv'?", "tierkv: missing"]),
        ({"tierkv": STACK, "host": 1}, ["host = 1", "unknown key", "allowed here: tierkv"]),
        ({"tierkv": 7}, ["tierkv = 7", "must be the path"]),
        ({"tierkv": {"host": {"capasity": 1}}}, ["kv_connector_extra_config.tierkv", "host.capasity", "capacity"]),
        ({"tierkv": "/no/such/stack.toml"}, ["/no/such/stack.toml"]),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, object], words: list[str]) -> None:
    """A server that does not start must say which word to change."""
    with pytest.raises(ConfigError) as caught:
        read_options(extra)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_served_versions(version: str) -> None:
    """Builds and release candidates of a served minor version are that version."""
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "dev"])
def test_another_version_is_refused_by_name(version: str) -> None:
    """Interfaces change between minor versions: better a sentence at the start than a crash in the first step."""
    with pytest.raises(EngineVersionError, match=version) as caught:
        check_version(version)
    assert all(minor in str(caught.value) for minor in SUPPORTED)


def test_without_vllm_the_package_says_so() -> None:
    """The adapter is part of tierkv, the engine is not: what is missing has a name."""
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(EngineVersionError, match=r"0\.32"):
            _ = adapter.TierKVConnector
    with pytest.raises(AttributeError, match="TierKVConnector"):
        _ = adapter.TierKVConector
