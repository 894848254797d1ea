"""Kinds of values in a stack description: tables, sizes, counts, times, names, quotas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tierkv.config.units import parse_size
from tierkv.types.cache_events import HOST

OWN_TRACER = "program"
"""Value of ``record.spans`` that selects the tracer provider which the program has set."""

_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DAY_S = 86_400.0


def _check_tier_name(name: str) -> str:
    if not _TIER_NAME.fullmatch(name):
        raise ValueError("must be at most 32 lower-case letters, digits, - and _, a letter first")
    if name == HOST:
        raise ValueError(f"{HOST!r} is the name of the host tier; choose another")
    return name


def _check_spans(where: str) -> str:
    if where != OWN_TRACER and not where.startswith(("http://", "https://")):
        raise ValueError(
            f'give "{OWN_TRACER}", or the URL of a collector for OTLP over HTTP, such as '
            '"http://127.0.0.1:4318/v1/traces"'
        )
    return where


def default_tier_name(backend: object) -> str:
    """Derive a valid tier name from the backend's name, so that only an invalid `backend` is reported."""
    name = re.sub(r"[^a-z0-9_-]", "-", str(backend).lower())[:32]
    return name if _TIER_NAME.fullmatch(name) else "unnamed"


Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Threads = Annotated[int, Field(ge=1, le=256)]
PositiveSeconds = Annotated[float, Field(gt=0, le=_DAY_S)]
Seconds = Annotated[float, Field(ge=0, le=_DAY_S)]
TierName = Annotated[str, AfterValidator(_check_tier_name)]
Name = Annotated[str, Field(min_length=1)]
SpansTarget = Annotated[str, AfterValidator(_check_spans)]

TenantQuota = Annotated[
    Size | None,
    Field(
        description="Bytes that each tenant may fill. Beyond it, the tenant's own chunks are evicted, also where "
        "the tier has room. Default: no limit but the capacity.",
    ),
]
TenantQuotas = Annotated[
    Mapping[str, Size],
    Field(description='Bytes that single tenants may fill instead, by `cache_salt`; `""` for requests without a salt.'),
]


class Table(BaseModel):
    """Strict model: a number in quotes, true in place of 1, or an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
