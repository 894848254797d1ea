"""Resolution of a description: names become plugins, and options become the plugins' option objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tierkv.abc import BackendPlugin, CodecPlugin, PolicyPlugin
from tierkv.config.options import ConfigurablePlugin, make_options
from tierkv.config.problems import Problem, raise_problems
from tierkv.config.schema import StackConfig
from tierkv.config.tier_schema import TierConfig
from tierkv.config.units import format_size
from tierkv.errors import PluginError
from tierkv.plugins.origins import Registered
from tierkv.plugins.registry import PluginRegistry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ResolvedTier:
    """A tier and the plugins that it names."""

    config: TierConfig
    """The tier's table."""
    backend: BackendPlugin
    """The backend."""
    options: Any
    """Options of the backend, an object of ``backend.options``."""
    codec: CodecPlugin
    """The codec."""
    codec_options: Any
    """Options of the codec, an object of ``codec.options``."""
    policy: PolicyPlugin
    """The eviction policy."""
    io_threads: int
    """Number of I/O threads: the configured one, or the backend's preferred concurrency."""


@dataclass(frozen=True, slots=True)
class ResolvedStack:
    """A stack that can be opened: no plugin is missing or broken, and no settings contradict each other."""

    config: StackConfig
    """The description."""
    host_policy: PolicyPlugin
    """Eviction policy of the host tier."""
    tiers: tuple[ResolvedTier, ...]
    """Lower tiers, fastest first."""


def resolve(config: StackConfig, registry: PluginRegistry, source: str = "<inline>") -> ResolvedStack:
    """Find every plugin that a stack names and check the settings against the plugins. Opens nothing.

    Args:
        config: the description.
        registry: the installed plugins.
        source: name of the description in messages.

    Raises:
        ConfigError: lists every problem: unknown or broken plugins with the nearest name, options refused by a backend
            or codec, capacities and write policies that do not fit the backend, lossy codecs in exact tiers.
    """
    tiers, problems = resolve_parts(config, registry)
    raise_problems(source, problems)
    return ResolvedStack(config, registry.require_policy(config.host.policy).plugin, tiers)


def resolve_parts(config: StackConfig, registry: PluginRegistry) -> tuple[tuple[ResolvedTier, ...], list[Problem]]:
    """Resolve what can be, and collect the problems of the rest.

    With problems, the tiers are good for checks and for nothing else: those without a backend are left out, and wrong
    options, codecs and policies have been replaced by the defaults.
    """
    problems: list[Problem] = []
    _require(registry.require_policy, "host.policy", config.host.policy, problems)
    backends = [tier.backend for tier in config.tiers]
    found = [
        _resolve_tier(tier, f"tiers[{index}]", registry, backends, problems) for index, tier in enumerate(config.tiers)
    ]
    tiers = tuple(tier for tier in found if tier is not None)
    return tiers, problems + _check_tokens_path(config, tiers)


def _check_tokens_path(config: StackConfig, tiers: Sequence[ResolvedTier]) -> list[Problem]:
    """Refuse to keep tokens that no event has, or that a tier's codec conceals: tokens are the prompt."""
    path = config.events.tokens_path
    if path is None:
        return []
    if not config.events.self_describing:
        return [Problem("events.tokens_path", "needs events.self_describing = true: other events have no tokens", path)]
    return [
        Problem(
            "events.tokens_path",
            f"the file would have in the clear what codec {tier.codec.name!r} of tier {tier.config.name!r} conceals, "
            "because tokens are the prompt; leave the key out, or choose a codec that does not conceal",
            path,
        )
        for tier in tiers
        if tier.codec.conceals
    ]


def _resolve_tier(
    tier: TierConfig, path: str, registry: PluginRegistry, backends: Sequence[str], problems: list[Problem]
) -> ResolvedTier | None:
    codec, codec_options = _resolve_codec(tier, f"{path}.codec", registry, problems)
    policy = _require(registry.require_policy, f"{path}.policy", tier.policy, problems)
    backend = _require(partial(registry.require_backend, others=backends), f"{path}.backend", tier.backend, problems)
    if backend is None:
        return None
    problems += _check_against_capabilities(tier, path, backend)
    options = _resolve_options(backend, tier.options, path, f"{path}.backend", problems)
    if options is None:
        return None
    io_threads = tier.io_threads or backend.capabilities.preferred_concurrency
    policy = policy or registry.require_policy(TierConfig.model_fields["policy"].default).plugin
    return ResolvedTier(tier, backend, options, codec, codec_options, policy, io_threads)


def _resolve_codec(
    tier: TierConfig, path: str, registry: PluginRegistry, problems: list[Problem]
) -> tuple[CodecPlugin, Any]:
    """Return the codec and its options object, or those of the default where there is a problem."""
    codec = _require(registry.require_codec, path, tier.codec.name, problems)
    if codec is not None:
        if codec.lossy and not tier.lossy:
            lossless = ", ".join(sorted(name for name, item in registry.codecs.items() if not item.plugin.lossy))
            message = (
                "is lossy: values would come back as approximations; write lossy = true for this tier if they may, or "
                f"choose a lossless codec: {lossless}"
            )
            problems.append(Problem(path, message, codec.name))
        options = _resolve_options(codec, tier.codec.options, path, path, problems)
        if options is not None:
            return codec, options
    default = registry.require_codec(TierConfig.model_fields["codec"].default.name).plugin
    return default, default.options()


def _resolve_options(
    plugin: ConfigurablePlugin, given: Mapping[str, Any], path: str, named_at: str, problems: list[Problem]
) -> Any:  # noqa: ANN401  the plugin's own type
    """Return the options object; with problems one of the keys that are right, if that is enough; otherwise None."""
    try:
        options, wrong = make_options(plugin, given, path)
        problems += wrong
        paths = {problem.path for problem in wrong}
        if wrong:
            right = {key: value for key, value in given.items() if f"{path}.{key}" not in paths}
            options, _ = make_options(plugin, right, path)
    except PluginError as error:
        problems.append(Problem(named_at, str(error), plugin.name))
        return None
    return options


def _require(require: Callable[[str], Registered[T]], path: str, name: str, problems: list[Problem]) -> T | None:
    try:
        return require(name).plugin
    except PluginError as error:
        problems.append(Problem(path, str(error), name))
        return None


def _check_against_capabilities(tier: TierConfig, path: str, backend: BackendPlugin) -> list[Problem]:
    can = backend.capabilities
    problems: list[Problem] = []
    if can.read_only and tier.write != "read_only":
        message = f'backend {backend.name!r} never writes; set write = "read_only"'
        problems.append(Problem(f"{path}.write", message, tier.write))
    if can.shared and tier.capacity is not None:
        message = (
            f"backend {backend.name!r} is shared with other processes, so no single one can keep it within a capacity; "
            f"remove the key, and set a limit or lifetime in the shared storage"
        )
        problems.append(Problem(f"{path}.capacity", message, format_size(tier.capacity)))
    if tier.capacity is None and (tier.tenant_quota is not None or tier.tenant_quotas):
        key, value = ("tenant_quota", tier.tenant_quota) if tier.tenant_quota else ("tenant_quotas", tier.tenant_quotas)
        message = (
            f"backend {backend.name!r} does not track its chunks without a capacity, so quotas cannot be enforced; set "
            f"quotas on the tiers with a capacity"
        )
        problems.append(Problem(f"{path}.{key}", message, value))
    if can.bounded and not can.shared and tier.capacity is None:
        message = f'missing; backend {backend.name!r} needs a limit, such as capacity = "100GiB"'
        problems.append(Problem(f"{path}.capacity", message))
    if tier.io_threads is not None and tier.io_threads > can.preferred_concurrency:
        message = f"backend {backend.name!r} takes at most {can.preferred_concurrency} calls at once"
        problems.append(Problem(f"{path}.io_threads", message, tier.io_threads))
    return problems
