"""Discovery of installed plugins. :func:`load_plugins` is its public function.

A *plugin* is a module or object that implements hooks of :mod:`tierkv.hookspecs`. Its hooks return *registered values*:
backends, codecs and policies (:mod:`tierkv.abc.plugin`). Each value keeps the *origin* of its plugin: entry point,
distribution and version. A plugin that cannot be used becomes a *broken plugin*, with its error and traceback.

Flow: :mod:`~tierkv.plugins.loading` imports the built-in plugin, the objects handed over by the caller, and the entry
points of the group ``tierkv``, in that order. :mod:`~tierkv.plugins.calls` asks each plugin's hooks, and
:mod:`~tierkv.plugins.validation` checks what they return. The result is an immutable
:class:`~tierkv.plugins.registry.PluginRegistry`. A stack resolves the names of its description in the registry, and
opens backends, codecs and policies with :func:`~tierkv.plugins.calls.open_value`.

Invariants:

- No plugin is imported before :func:`load_plugins` is called.
- A plugin is used as a whole or not at all. A broken plugin never stops a stack that does not ask for it.
- The first plugin to register a name keeps it, and the load order is the same on every machine.
- The origin alone decides whether a policy runs under the guard (``Origin.is_builtin``).
"""

from tierkv.plugins.loading import load_plugins

__all__ = ["load_plugins"]
