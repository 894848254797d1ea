"""Discovery of installed plugins: :func:`load_plugins` is the face."""

from tierkv.plugins.loading import load_plugins

__all__ = ["load_plugins"]
