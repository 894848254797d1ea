"""The plugin that ships with tierkv: its codecs and policies, registered through the same hooks as anybody's.

:mod:`tierkv.plugins.loading` loads it by name, like any installed plugin, so no module of the
framework imports the codecs and policies for their names.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import CodecPlugin, PolicyPlugin
from tierkv.codecs import CODEC_PLUGINS
from tierkv.hookspecs import hookimpl
from tierkv.policies import POLICY_PLUGINS

TIERKV_SPI = 1


@hookimpl
def tierkv_codecs() -> Iterable[CodecPlugin]:
    """The codecs of :mod:`tierkv.codecs`."""
    return CODEC_PLUGINS


@hookimpl
def tierkv_policies() -> Iterable[PolicyPlugin]:
    """The eviction policies of :mod:`tierkv.policies`."""
    return POLICY_PLUGINS
