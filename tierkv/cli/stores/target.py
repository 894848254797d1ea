"""Shared options, and what they name: places, namespaces, chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from tierkv.abc import StoredNamespace
from tierkv.errors import BackendError, ConfigError, TierKVError
from tierkv.plugins.loading import load_plugins
from tierkv.stores.findings import Finding, FindingKind
from tierkv.stores.places import Place, find_places
from tierkv.stores.selection import (
    ChunkFilter,
    NamespaceFilter,
    parse_age,
    parse_key,
    parse_tenant,
    read_namespace_file,
    stored_namespaces,
)
from tierkv.types.keys import Tenant

F = TypeVar("F", bound=Callable[..., Any])


class ParsedType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in newer clicks only
    """Text of an option as a parser understands it.

    Args:
        name: of the value, for the help.
        parse: raises a ValueError that says what is wrong.
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Parse the text; a value that was parsed before stays as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


AGE = ParsedType("age", parse_age)
"""An age such as ``7d``, in seconds."""
KEY = ParsedType("key", parse_key)
"""A key of a chunk, in hex or as hash.group."""
TENANT = ParsedType("salt", parse_tenant)
"""A cache salt, or the digest of one."""

_TIER = click.option("--tier", metavar="NAME", help="Only this tier of the stack file.")
_BACKEND = click.option(
    "--backend", metavar="NAME", help="Backend of a path or URL. Default: the one that recognises it."
)
_NAMESPACE = click.option(
    "-n",
    "--namespace",
    "--model",
    "names",
    metavar="MODEL",
    multiple=True,
    help="Only namespaces of this model (a name or a pattern such as 'qwen*'), or with this beginning of the "
    "fingerprint. May be repeated.",
)
_NAMESPACE_FILE = click.option(
    "--namespace-file",
    type=click.Path(path_type=Path),
    help="File that describes namespaces, for a backend that cannot list them: a namespace.json, or the output of "
    "`tierkv ls --json`.",
)
_TENANT = click.option(
    "--tenant",
    type=TENANT,
    help="Only chunks of the tenant with this cache salt; id:HEX for its digest, - for requests without a salt.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@dataclass(frozen=True, slots=True)
class PlaceChoice:
    """Values of the options that choose among the places and namespaces of a target."""

    tier: str | None
    backend: str | None
    names: tuple[str, ...]
    """Of the option ``--namespace``."""
    namespace_file: Path | None


def place_options(command: F) -> F:
    """Add the options that choose places and namespaces, which the command gets as ``choice``, and ``--json``."""

    @wraps(command)
    def gathered(
        *arguments: Any,  # noqa: ANN401 - those of the command
        tier: str | None,
        backend: str | None,
        names: tuple[str, ...],
        namespace_file: Path | None,
        **options: Any,  # noqa: ANN401 - (the same)
    ) -> Any:  # noqa: ANN401 - (the same)
        return command(*arguments, choice=PlaceChoice(tier, backend, names, namespace_file), **options)

    with_options: Any = gathered
    for option in reversed((_TIER, _BACKEND, _NAMESPACE, _NAMESPACE_FILE, _JSON)):
        with_options = option(with_options)
    return cast("F", with_options)


def tenant_option(command: F) -> F:
    """Add the option that chooses a tenant."""
    return _TENANT(command)


@dataclass(slots=True)
class Target:
    """Places and stores that a command line names."""

    places: list[Place]
    """Places of the target."""
    stores: list[tuple[Place, StoredNamespace]] = field(default_factory=list)
    """Their chosen namespaces, least recently used first."""
    findings: list[Finding] = field(default_factory=list)
    """Places and namespaces that cannot be listed."""


def find_target(
    where: str, choice: PlaceChoice, *, unused_for_s: float | None = None, may_be_empty: bool = False
) -> Target:
    """Find the places of a command line, and list their namespaces.

    Args:
        where: stack file, path, URL or export folder.
        choice: which of its places and namespaces.
        unused_for_s: only namespaces that were not used for so long.
        may_be_empty: whether a choice of namespaces may match none; the caller checks it with :func:`need_match`.

    Raises:
        TierKVError: nothing of the kind is there; says what to do.
    """
    if "" in choice.names:
        raise ConfigError("--namespace is empty: give a model, a pattern or the beginning of a fingerprint")
    target = Target(find_places(where, load_plugins(), tier=choice.tier, backend=choice.backend))
    since = None if unused_for_s is None else time.time() - unused_for_s
    named = [] if choice.namespace_file is None else read_namespace_file(choice.namespace_file)
    for place, found in stored_namespaces(target.places, NamespaceFilter(choice.names, since), named):
        if isinstance(found, StoredNamespace):
            target.stores.append((place, found))
        else:
            target.findings.append(Finding(FindingKind.UNUSABLE, place.name, "", place.where, str(found)))
    if not may_be_empty:
        need_match(where, choice, target)
    target.stores.sort(key=lambda each: each[1].last_used_s or 0.0)
    return target


def need_match(where: str, choice: PlaceChoice, target: Target) -> None:
    """Refuse a choice of namespaces that matches none.

    Raises:
        BackendError: it does.
    """
    if choice.names and not target.stores and not target.findings:
        raise BackendError(f"{where}: no namespace matches {', '.join(choice.names)}; `tierkv ls {where}` lists them")


def chunk_filter(
    tenant: Tenant | None = None, older_than_s: float | None = None, keys: tuple[str, ...] = ()
) -> ChunkFilter:
    """Return the choice of chunks that the options make."""
    before = None if older_than_s is None else time.time() - older_than_s
    return ChunkFilter(tenant, before, frozenset(keys) or None)


def not_opened(place: Place, stored: StoredNamespace, error: TierKVError) -> Finding:
    """Return the finding that a store could not be opened or listed."""
    fingerprint = stored.namespace.fingerprint().hex()
    return Finding(FindingKind.UNUSABLE, place.name, fingerprint, stored.namespace.model, str(error))
