"""The description of a stack: its schema, its loading, and its resolution against the installed plugins.

Importing it brings pydantic, and no plugin.
"""

from tierkv.config.loading import default_mapping, load_config, load_default, parse_config
from tierkv.config.resolving import ResolvedStack, ResolvedTier, resolve
from tierkv.config.schema import (
    ChunkConfig,
    HostConfig,
    LookupConfig,
    NamespaceConfig,
    StackConfig,
    StoreConfig,
    TierConfig,
)
from tierkv.config.units import format_size, parse_size, round_size

__all__ = [
    "ChunkConfig",
    "HostConfig",
    "LookupConfig",
    "NamespaceConfig",
    "ResolvedStack",
    "ResolvedTier",
    "StackConfig",
    "StoreConfig",
    "TierConfig",
    "default_mapping",
    "format_size",
    "load_config",
    "load_default",
    "parse_config",
    "parse_size",
    "resolve",
    "round_size",
]
