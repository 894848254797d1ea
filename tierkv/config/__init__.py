"""Configuration of a stack: schema, loading, and resolution against the installed plugins.

A *description* is a file, or a mapping of the same keys. :mod:`~tierkv.config.schema` defines its sections as pydantic
models. A *problem* (:mod:`~tierkv.config.problems`) is one fault with its key path, value and allowed values.

Flow: :mod:`~tierkv.config.reading` parses TOML, YAML or JSON into a mapping. :mod:`~tierkv.config.loading` checks it
against the schema and returns a :class:`StackConfig`. :func:`resolve` looks up the named backends, codecs and
policies in the plugin registry, and builds the option objects of backends and codecs (:mod:`~tierkv.config.options`).
The result is a :class:`ResolvedStack`, which can be opened.

:mod:`~tierkv.config.describing` puts allowed values in words, for messages and for the reference page
(:mod:`~tierkv.config.reference`). :mod:`~tierkv.config.units` parses and formats sizes.

Invariants:

- All problems of a description are reported at once, in one :class:`~tierkv.errors.ConfigError`. For
  ``tierkv check`` a description has a :class:`SoundPart`, which is checked further in the same pass.
- Unknown keys and values of another type are errors, never guesses.
- Secrets are never shown in a message.
- Importing this package imports pydantic, but no plugin. Nothing here opens a backend.
"""

from tierkv.config.loading import (
    SoundPart,
    default_mapping,
    load_config,
    load_default,
    load_sound_part,
    parse_config,
    parse_sound_part,
)
from tierkv.config.resolving import ResolvedStack, ResolvedTier, resolve, resolve_parts
from tierkv.config.schema import (
    ChunkConfig,
    HostConfig,
    LookupConfig,
    NamespaceConfig,
    StackConfig,
    StoreConfig,
)
from tierkv.config.tier_schema import TierConfig
from tierkv.config.units import format_size, parse_size

__all__ = [
    "ChunkConfig",
    "HostConfig",
    "LookupConfig",
    "NamespaceConfig",
    "ResolvedStack",
    "ResolvedTier",
    "SoundPart",
    "StackConfig",
    "StoreConfig",
    "TierConfig",
    "default_mapping",
    "format_size",
    "load_config",
    "load_default",
    "load_sound_part",
    "parse_config",
    "parse_size",
    "parse_sound_part",
    "resolve",
    "resolve_parts",
]
