"""Places: what a stack file, a path or a URL names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv._version import __version__
from tierkv.abc import BackendPlugin, StoredNamespace
from tierkv.abc.places import exists
from tierkv.config import ResolvedTier, load_config, resolve
from tierkv.config.options import describe_options, make_options
from tierkv.config.reading import SUFFIXES
from tierkv.errors import BackendError, ConfigError, TierKVError
from tierkv.plugins.origins import Origin
from tierkv.plugins.registry import PluginRegistry
from tierkv.stores.folder import FOLDER, is_folder

LOCATIONS = ("path", "url")
"""Options by which a backend is given its place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Storage of one tier."""

    name: str
    """Name of the tier; of a path or URL, that of its backend."""
    where: str
    """Path or URL, for messages."""
    backend: BackendPlugin
    """The backend."""
    options: Any
    """Its options."""
    origin: Origin
    """The plugin that registered it."""
    capacity_bytes: int | None = None
    """Capacity of the tier; None: unknown, or without a bound."""
    concealing_codec: str | None = None
    """Codec of a tier in which nothing may be stored in the clear; None for other tiers."""
    accepts_clear: bool = True
    """Whether such a tier takes frames in the clear as well."""
    accepts_lossy: bool = True
    """Whether the tier may hold approximations."""

    def list_namespaces(self) -> Iterator[StoredNamespace | TierKVError]:
        """Yield the namespaces stored here; a :class:`TierKVError` for one that cannot be described.

        Raises:
            BackendError: the backend cannot list them, or the place is not its own.
        """
        if self.backend.at_rest is None:
            raise BackendError(
                f"backend {self.backend.name!r} cannot list its namespaces: describe them with --namespace-file, the "
                "output of `tierkv ls --json` at another tier of the stack, or of `json.dumps(stack.namespace.describe"
                "())` in the program that stores there",
                tier=self.name,
            )
        yield from self.backend.at_rest.namespaces(self.options)


def find_places(
    target: str, registry: PluginRegistry, *, tier: str | None = None, backend: str | None = None
) -> list[Place]:
    """Return the places that a target names: the lower tiers of a stack file, or the storage at a path or URL.

    Args:
        target: a stack file, a directory, a URL, or an export folder.
        registry: the installed plugins.
        tier: the only tier of the stack file to use.
        backend: name of the backend of a path or URL; None: the one that recognises it.

    Raises:
        ConfigError: the target names nothing, or not one backend recognises it; says what to do.
    """
    if Path(target).suffix.lower() in SUFFIXES and not Path(target).is_dir():
        if backend is not None:
            raise ConfigError(f"--backend {backend}: {target} is a stack file, which names its backends; leave it out")
        return _tiers_of(target, registry, tier)
    if tier is not None:
        raise ConfigError(f"--tier {tier}: only a stack file has tiers, and {target} is none")
    if backend is not None:
        return [_place_by(target, registry, backend)]
    return [_recognised(target, registry)]


def only_place(target: str, places: list[Place], option: str) -> Place:
    """Return the only place.

    Raises:
        ConfigError: there are several, or none.
    """
    if len(places) == 1:
        return places[0]
    names = ", ".join(place.name for place in places) or "none"
    raise ConfigError(f"{target} has several tiers ({names}): choose one with {option}")


def _tiers_of(target: str, registry: PluginRegistry, tier: str | None) -> list[Place]:
    stack = resolve(load_config(target), registry, target)
    places = [_place_of(each, registry) for each in stack.tiers]
    if not places:
        raise ConfigError(f"{target}: this stack has no lower tier, and the host tier ends with its engine")
    if tier is None:
        return places
    chosen = [place for place in places if place.name == tier]
    if not chosen:
        raise ConfigError(f"--tier {tier}: {target} has {', '.join(place.name for place in places)}")
    return chosen


def _place_of(tier: ResolvedTier, registry: PluginRegistry) -> Place:
    config = tier.config
    return Place(
        config.name,
        _location(tier.options) or config.name,
        tier.backend,
        tier.options,
        registry.backends[tier.backend.name].origin,
        config.capacity,
        tier.codec.name if tier.codec.conceals else None,
        config.accept_clear or not tier.codec.conceals,
        config.lossy,
    )


def _location(options: object) -> str:
    return next((str(value) for name in LOCATIONS if (value := getattr(options, name, None))), "")


def folder_place(target: str) -> Place:
    """Return the export folder at a path, which need not exist yet."""
    origin = Origin(FOLDER.name, "tierkv", __version__, "tierkv.stores.folder", is_builtin=True)
    return Place(FOLDER.name, target, FOLDER, FOLDER.options(target), origin)


def _place_by(target: str, registry: PluginRegistry, backend: str) -> Place:
    if backend == FOLDER.name:
        return folder_place(target)
    registered = registry.require_backend(backend)
    place = _try_place(target, registered.plugin, registered.origin)
    if isinstance(place, str):
        raise ConfigError(f"{target}: backend {backend!r} needs a stack file: {place}")
    return place


def _option_names(plugin: BackendPlugin) -> set[str]:
    return {option.name for option in describe_options(plugin)}


def _try_place(target: str, plugin: BackendPlugin, origin: Origin) -> Place | str:
    """Return the place with these options, or the reason why there is none."""
    # A shell's paths are relative to its folder, while a backend may want an absolute one, as in a stack file.
    given = target if "://" in target else str(Path(target).expanduser().absolute())
    names = {name: given for name in LOCATIONS if name in _option_names(plugin)}
    if not names:
        return "it has neither `path` nor `url`"
    options, problems = make_options(plugin, names, "target")
    if problems:
        return "; ".join(str(problem) for problem in problems)
    return Place(plugin.name, target, plugin, options, origin)


def _candidates(target: str, registry: PluginRegistry) -> Iterator[tuple[str, Place | str]]:
    """Yield the target as a place of each backend that can list namespaces, or why such a backend refuses a URL."""
    is_url = "://" in target
    for name, registered in sorted(registry.backends.items()):
        plugin = registered.plugin
        if plugin.at_rest is None or plugin.capabilities.read_only:
            continue
        if is_url and "url" not in _option_names(plugin):
            continue
        place = _try_place(target, plugin, registered.origin)
        if is_url or isinstance(place, Place):
            yield name, place


def _is_filled(place: Place) -> bool | str:
    """Whether a place has a namespace, or why that is unknown."""
    try:
        return next(place.list_namespaces(), None) is not None
    except TierKVError as error:
        return str(error)


def _recognised(target: str, registry: PluginRegistry) -> Place:
    """Return the place of the only backend that finds a namespace at the target, or that calls it its own.

    Raises:
        ConfigError: no backend, or several.
    """
    if "://" not in target:
        if not exists(Path(target)):
            raise ConfigError(f"{target}: there is no such file or directory")
        if is_folder(Path(target)):
            return folder_place(target)
    own: list[Place] = []
    filled: list[Place] = []
    reasons: list[str] = []
    for name, place in _candidates(target, registry):
        found = place if isinstance(place, str) else _is_filled(place)
        if isinstance(place, str) or isinstance(found, str):
            reasons.append(f"{name}: {found}")
        elif found:
            filled.append(place)
        elif "://" in target or "path" in _option_names(place.backend):  # any directory could become a `url`
            own.append(place)
    chosen = filled or own
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        names = ", ".join(place.name for place in chosen)
        raise ConfigError(f"{target}: {names} could be its backend: choose one with --backend")
    why = "".join(f"\n  {reason}" for reason in reasons)
    raise ConfigError(f"{target!r} is no place that an installed backend can use; give a stack file or --backend{why}")
