"""Hook specification (pluggy). Hooks register values and deliver events. No hook is on the data path.

A plugin is a module or object with an entry point in the group ``tierkv``. It states ``TIERKV_SPI`` and marks its
implementations with :data:`hookimpl`::

    from tierkv.abc import BackendPlugin
    from tierkv.hookspecs import hookimpl

    TIERKV_SPI = 1

    @hookimpl
    def tierkv_backends():
        return [BackendPlugin(name="foo", ...)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

from tierkv.abc.plugin import BackendPlugin, CodecPlugin, PolicyPlugin

if TYPE_CHECKING:
    import click

    from tierkv.types.cache_events import CacheEvent

PROJECT = "tierkv"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def tierkv_backends() -> Iterable[BackendPlugin]:  # type: ignore[empty-body]
    """Register kinds of tiers.

    When: once per process, when plugins are loaded (a stack is configured, or ``tierkv plugins`` runs).
    Thread: the caller's. Return: any number of plugins. Failure: the plugin is reported as broken, and none of it is
    used.
    """


@hookspec
def tierkv_codecs() -> Iterable[CodecPlugin]:  # type: ignore[empty-body]
    """Register codecs. When, thread, return and failure as for :func:`tierkv_backends`."""


@hookspec
def tierkv_policies() -> Iterable[PolicyPlugin]:  # type: ignore[empty-body]
    """Register eviction policies. When, thread, return and failure as for :func:`tierkv_backends`."""


@hookspec
def tierkv_commands() -> Iterable[click.Command]:  # type: ignore[empty-body]
    """Register commands of the ``tierkv`` program.

    When: once, if the program is called with a command that is not its own, or ``tierkv plugins`` runs. Thread: main.
    Return: any number of commands. Failure: a warning names the plugin; all other commands work.
    """


@hookspec
def tierkv_observe(events: Sequence[CacheEvent]) -> None:
    """Receive the events of chunks stored in and removed from tiers, in order.

    When: at most once per engine step, with all events since the previous call; not called without events.
    Thread: a framework thread, never the engine's. Return: nothing. Failure: logged; this observer misses the events
    of that call. If an observer is too slow, events are dropped and logged.
    """
