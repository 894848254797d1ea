"""A plugin whose ``open`` fails stops only the stack that names it, and the error names the plugin."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.abc import BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.errors import BackendError, PluginError, TierKVError
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.plugins.registry import PluginRegistry
from tierkv.types.engine import EngineSpec, GroupSpec

SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)


def fails(*_: object) -> Any:
    """Raise as a plugin does on an unsupported machine."""
    raise RuntimeError("no licence file")


def ends(*_: object) -> Any:
    """Raise SystemExit, as a plugin does that was written as a program."""
    raise SystemExit(3)


def registry(make: Any = fails) -> PluginRegistry:
    """Registry with a codec, a policy and a backend that cannot be opened."""
    known = load_plugins()

    class Broken:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_codecs(self) -> list[CodecPlugin]:
            return [replace(known.codecs["none"].plugin, name="badcodec", open=make)]

        @hookimpl
        def tierkv_policies(self) -> list[PolicyPlugin]:
            return [replace(known.policies["lru"].plugin, name="badpolicy", open=make)]

        @hookimpl
        def tierkv_backends(self) -> list[BackendPlugin]:
            return [replace(known.backends["disk"].plugin, name="badbackend", open=make, check=None)]

    return load_plugins([Broken()])


def stack_of(place: Path, host: dict[str, Any] | None = None, **tier: Any) -> dict[str, Any]:
    """Description of a host tier and a disk."""
    disk = {"name": "below", "backend": "disk", "path": str(place / "d"), "capacity": "8MiB", "min_free_bytes": 0}
    return {"host": {"capacity": "1MiB", **(host or {})}, "tiers": [disk | tier]}


@pytest.mark.parametrize("tiers", [False, True])
def test_an_unused_broken_codec_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, *, tiers: bool) -> None:
    """All codecs are opened to read stored frames. A codec that fails is logged and left out: an installed but unused
    plugin must not stop every stack on the machine.
    """
    config = stack_of(tmp_path) if tiers else {"host": {"capacity": "1MiB"}}
    with caplog.at_level(logging.WARNING, "tierkv"):
        tierkv.open_stack(config, SPEC, plugins=registry()).close()
    messages = [record.getMessage() for record in caplog.records if "badcodec" in record.getMessage()]
    assert len(messages) == tiers
    assert all("Broken" in text and "no licence file" in text for text in messages)


@pytest.mark.parametrize("make", [fails, ends])
@pytest.mark.parametrize(
    ("host", "tier", "error", "named"),
    [
        ({}, {"codec": "badcodec"}, PluginError, "tier 'below': codec 'badcodec'"),
        ({}, {"policy": "badpolicy"}, PluginError, "tier 'below': eviction policy 'badpolicy'"),
        ({"policy": "badpolicy"}, {}, PluginError, "tier 'host': eviction policy 'badpolicy'"),
        ({}, {"backend": "badbackend", "required": True}, BackendError, "tier 'below': backend 'badbackend'"),
    ],
)
def test_a_plugin_that_cannot_be_opened_is_named(
    tmp_path: Path, make: Any, host: dict[str, Any], tier: dict[str, Any], error: type[TierKVError], named: str
) -> None:
    """Whatever a plugin raises, the error names tier, plugin and cause, and all opened resources are closed."""
    what = "no licence file" if make is fails else "SystemExit: 3"
    with pytest.raises(error, match=rf"{named} of Broken .*{what}") as caught:
        tierkv.open_stack(stack_of(tmp_path, host, **tier), SPEC, plugins=registry(make))
    assert caught.value.tier == named.split("'")[1]
    tierkv.open_stack(stack_of(tmp_path), SPEC).close()


def test_a_tierkv_error_is_passed_on_with_the_tier(tmp_path: Path) -> None:
    """A backend that raises a TierKVError describes the cause best; the stack adds the tier."""
    ours = BackendError("the bucket is in another country")

    def refuse(*_: object) -> Any:
        raise ours

    with pytest.raises(BackendError) as caught:
        tierkv.open_stack(stack_of(tmp_path, backend="badbackend", required=True), SPEC, plugins=registry(refuse))
    assert caught.value is ours
    assert caught.value.tier == "below"
