"""Options in the extra configuration of vLLM's connector, and supported versions of vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import tierkv.integrations.vllm as adapter
from tierkv.errors import ConfigError, EngineVersionError
from tierkv.integrations.vllm import versions
from tierkv.integrations.vllm.options import read_options
from tierkv.integrations.vllm.versions import SUPPORTED, check_strict, is_supported, load_checked

STACK = {"host": {"capacity": "1MiB"}}
UNKNOWN = ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "dev"]


def test_a_description_inline() -> None:
    """One JSON argument on the command line is the shortest way to serve."""
    options = read_options({"tierkv": STACK})
    assert (options.stack.host.capacity, options.source) == (1 << 20, "kv_connector_extra_config.tierkv")


def test_the_path_of_a_description(tmp_path: Path) -> None:
    """An administrator writes one file, and every server reads it."""
    path = tmp_path / "stack.toml"
    path.write_text('[host]\ncapacity = "2MiB"\n')
    options = read_options({"tierkv": str(path)})
    assert (options.stack.host.capacity, options.source) == (2 << 20, str(path))


def test_keys_of_the_engine_are_its_own() -> None:
    """The engine keeps keys of its own beside ours; only those that are named are let pass."""
    options = read_options({"tierkv": STACK, "spec_name": "TierKVSpec"}, known=["spec_name"])
    assert options.stack.host.capacity == 1 << 20


def test_the_connector_of_vllm_is_not_ours() -> None:
    """With ``--kv-offloading-size``, vLLM looks for its own connector in the module of ours."""
    with pytest.raises(AttributeError, match=r"remove kv_connector_module_path; for TierKVConnector, remove --kv-off"):
        adapter.OffloadingConnector  # noqa: B018


def test_the_defaults_are_the_safe_ones() -> None:
    """A reset reaches every tier, and a version that inspection finds fit is used; both can be said otherwise."""
    assert (read_options({"tierkv": STACK}).reset_scope, read_options({"tierkv": STACK}).strict) == ("all", False)
    options = read_options({"tierkv": STACK, "tierkv_reset_scope": "host", "tierkv_strict": True})
    assert (options.reset_scope, options.strict) == ("host", True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["kv_connector_extra_config: tierkv", "missing", "stack.toml"]),
        ({"tierkw": STACK}, ["tierkw", "unknown key", "did you mean 'tierkv'?", "tierkv: missing"]),
        ({"tierkv": STACK, "host": 1}, ["host = 1", "unknown key", "allowed here: tierkv"]),
        ({"tierkv": STACK, "cpu_bytes_to_use": 9.0}, ["cpu_bytes_to_use", "--kv-offloading-size", "host.capacity"]),
        ({"tierkv": 7}, ["tierkv = 7", "must be the path"]),
        ({"tierkv": {"host": {"capasity": 1}}}, ["kv_connector_extra_config.tierkv", "host.capasity", "capacity"]),
        ({"tierkv": STACK, "tierkv_reset_scope": "disk"}, ["tierkv_reset_scope", "disk", '"all" or "host"']),
        ({"tierkv": STACK, "tierkv_strict": "yes"}, ["tierkv_strict", "yes", "true or false"]),
        ({"tierkv": "/no/such/stack.toml"}, ["/no/such/stack.toml"]),
        ({"tierkv": '{"host": {"capacity": "1MiB"}}'}, ["tierkv = ", "JSON object without quotes", "or a path"]),
        ({"tierkv": '[host]\ncapacity = "1MiB"'}, ["tierkv = ", "is the text of a description"]),
        ({"tierkv": "/"}, ["/: is a directory", "name the file"]),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, object], words: list[str]) -> None:
    """A server that does not start must say which word to change."""
    with pytest.raises(ConfigError) as caught:
        read_options(extra)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_served_versions(version: str) -> None:
    """Builds and release candidates of a served minor version are that version: nothing is inspected."""
    assert is_supported(version)
    check_strict(strict=True, version=version)
    assert load_checked(version, lambda: 7) == 7


@pytest.mark.parametrize("version", UNKNOWN)
def test_another_version_is_refused_by_name_where_that_is_wanted(version: str) -> None:
    """An operator may want tested versions only: the server then ends with one sentence at the start."""
    with pytest.raises(EngineVersionError, match=version) as caught:
        check_strict(strict=True, version=version)
    assert all(minor in str(caught.value) for minor in SUPPORTED)
    check_strict(strict=False, version=version)


@pytest.mark.parametrize("version", UNKNOWN)
def test_another_version_that_fits_is_used_with_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A minor version changes rarely what the adapters use: a warning that names the option, in place of no server."""
    monkeypatch.setattr(versions, "missing_names", list)
    monkeypatch.setattr(versions, "misfits", list)
    assert load_checked(version, lambda: 7) == 7
    (record,) = caplog.records
    assert version in record.getMessage()
    assert "tierkv_strict" in record.getMessage()


def _gone() -> object:
    raise ImportError("cannot import name 'CacheHitSource'")


@pytest.mark.parametrize(
    ("missing", "wrong", "load", "words"),
    [
        (["Request has no attribute 'ident'"], [], int, ["- Request has no attribute 'ident'"]),
        (["one"], ["two"], int, ["- one", "- two"]),
        ([], [], _gone, ["- cannot import name 'CacheHitSource'"]),
    ],
)
def test_another_version_that_does_not_fit_is_refused(
    missing: list[str], wrong: list[str], load: Any, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interfaces change between minor versions: better a list at the start than a crash in the first step."""
    monkeypatch.setattr(versions, "missing_names", lambda: missing)
    monkeypatch.setattr(versions, "misfits", lambda: wrong)
    with pytest.raises(EngineVersionError, match=r"0\.34") as caught:
        load_checked("0.34.0", load)
    assert all(word in str(caught.value) for word in (*words, *SUPPORTED))


def test_without_vllm_the_package_says_so() -> None:
    """The adapter is part of tierkv, the engine is not: what is missing has a name."""
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(EngineVersionError, match=r"0\.32"):
            _ = adapter.TierKVConnector
    with pytest.raises(AttributeError, match="TierKVConnector"):
        _ = adapter.TierKVConector
