"""Plugin that ships with tierkv: registers its codecs and policies through the public hooks.

:mod:`tierkv.plugins.loading` loads this module by name, like any installed plugin. No other module of the framework
imports the codecs and policies in order to list them.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import CodecPlugin, PolicyPlugin
from tierkv.codecs.builtin import CODEC_PLUGINS
from tierkv.hookspecs import hookimpl
from tierkv.policies.builtin import POLICY_PLUGINS

TIERKV_SPI = 1


@hookimpl
def tierkv_codecs() -> Iterable[CodecPlugin]:
    """Codecs of :mod:`tierkv.codecs`."""
    return CODEC_PLUGINS


@hookimpl
def tierkv_policies() -> Iterable[PolicyPlugin]:
    """Eviction policies of :mod:`tierkv.policies`."""
    return POLICY_PLUGINS
