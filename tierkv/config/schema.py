"""The description of a stack, as frozen values. Field descriptions are the text of docs/reference/configuration.md.

A model checks what it can see alone. Names of backends, codecs and policies, and the options of a backend, are checked
by :func:`tierkv.config.resolving.resolve`, which knows the installed plugins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tierkv.config.units import parse_size

HOST_TIER = "host"
"""The arena's name in events, metrics and messages; no other tier may have it."""

_TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DAY_S = 86_400.0


def _check_tier_name(name: str) -> str:
    if not _TIER_NAME.fullmatch(name):
        raise ValueError("must be at most 32 lower-case letters, digits, - and _, a letter first")
    if name == HOST_TIER:
        raise ValueError(f"{HOST_TIER!r} is the name of the host tier; choose another")
    return name


def _default_tier_name(backend: object) -> str:
    """The backend's name. A text that no backend can be named is bent into shape: the complaint is about `backend`."""
    name = re.sub(r"[^a-z0-9_-]", "-", str(backend).lower())[:32]
    return name if _TIER_NAME.fullmatch(name) else "unnamed"


Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Threads = Annotated[int, Field(ge=1, le=256)]
PositiveSeconds = Annotated[float, Field(gt=0, le=_DAY_S)]
Seconds = Annotated[float, Field(ge=0, le=_DAY_S)]
TierName = Annotated[str, AfterValidator(_check_tier_name)]
Name = Annotated[str, Field(min_length=1)]


class _Model(BaseModel):
    """Strict: a number in quotes, true for 1, or an unknown key is an error, not a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NamespaceConfig(_Model):
    """What makes KV bytes interchangeable, beyond what the engine itself knows (dtype, layout, block sizes, rank)."""

    model: Name | None = Field(
        default=None,
        description="Name of the model. Left out: the name that the engine gives. Set it to share a cache between "
        "engines that call one model by different names.",
    )
    revision: str | None = Field(
        default=None, description="Revision of the weights. Left out: the one that the engine gives."
    )
    epoch: str = Field(
        default="0",
        description="Any text. Change it when weights change under the same name: older chunks become unreachable.",
    )


class ChunkConfig(_Model):
    """How much of a sequence is stored and loaded as one unit. Give `blocks` or `tokens`, not both."""

    blocks: Count | None = Field(
        default=None, description="GPU blocks of the engine per chunk. Left out, and no `tokens` either: 1."
    )
    tokens: Count | None = Field(
        default=None,
        description="Tokens per chunk; must be a multiple of the engine's GPU block, checked when it starts.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        blocks, tokens = data.get("blocks"), data.get("tokens")
        if blocks is not None and tokens is not None:
            raise ValueError("`blocks` and `tokens` exclude each other; keep one")
        return {**data, "blocks": 1} if blocks is None and tokens is None else data


class TenantsConfig(_Model):
    """Tenants are told apart by the `cache_salt` of their requests. Quotas stand with each tier."""

    tracked_max: Count = Field(
        default=1024,
        description="Tenants with a quota of their own at once, in each tier; more of them share one quota.",
    )


TenantQuota = Annotated[
    Size | None,
    Field(
        description="Bytes that each tenant may fill; who has more loses its own chunks, also where there is room. "
        "Left out: no limit beside the capacity.",
    ),
]
TenantQuotas = Annotated[
    Mapping[str, Size],
    Field(description='Bytes for single tenants instead, by `cache_salt`; `""` are requests without one.'),
]


class HostConfig(_Model):
    """The host tier: pinned CPU memory, the only tier that the GPU touches."""

    capacity: Size = Field(description="Memory for chunks. It is allocated whole at start.")
    policy: Name = Field(default="lru", description="Eviction policy.")
    verify: bool = Field(
        default=True,
        description="Check every chunk's checksum once more on its way from host memory to the GPU. Frames that "
        "come from a tier below are always checked.",
    )
    tenant_quota: TenantQuota = None
    tenant_quotas: TenantQuotas = Field(default_factory=dict)
    copy_threads: Threads = Field(
        default=1,
        description="Threads of each worker that copy between GPU pages and host slots, or help a GPU to.",
    )
    gpu_staging: Size = Field(
        default=128 * 1024**2,
        description="GPU memory that each worker takes for chunks on their way, a quarter of it per buffer; at least "
        "four chunks. Nothing where the KV cache is in host memory.",
    )
    reserved_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8,
        description="Share of the slots that waiting requests may reserve together; the rest stays free for stores.",
    )


class CodecConfig(_Model):
    """A codec: its name, or a table with its name and options."""

    ALLOWED: ClassVar[str] = 'the name of a codec in quotes, or a table such as { name = "zstd", level = 3 }'

    name: Name = Field(description="Which plugin; `tierkv plugins` lists what is installed.")
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="Every other key of the table, as written; the codec's plugin checks them."
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, data: object) -> object:
        """A text is the name alone; of a table, set apart the codec's options."""
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping):
            return data
        named = {"name": data["name"]} if "name" in data else {}
        return named | {"options": {key: value for key, value in data.items() if key != "name"}}


class TierConfig(_Model):
    """One tier below the host tier. Keys that are not listed here are options of its backend."""

    name: TierName = Field(description="Name in messages, metrics and events. No two tiers have the same.")
    backend: Name = Field(description="Which plugin stores the bytes; `tierkv plugins` lists what is installed.")
    capacity: Size | None = Field(
        default=None,
        description="Bytes of frames it may hold; eviction keeps it below. Required for backends that are bounded "
        "and not shared, refused for shared ones.",
    )
    write: Literal["through", "on_reuse", "back", "read_only"] = Field(
        default="through",
        description="When chunks are written to it. `through`: as soon as the host tier has them. `on_reuse`: when "
        "they are wanted a second time. `back`: when the host tier is about to evict them. `read_only`: never.",
    )
    seen_keys_max: Count = Field(
        default=1_000_000,
        description="Chunks that are remembered as seen once, for `on_reuse`, also after the host tier has lost them; "
        "8 bytes each.",
    )
    codec: CodecConfig = Field(
        default=CodecConfig(name="none"),
        description='How payloads are written at rest: a name, or `{ name = "zstd", level = 3 }` with options. What '
        "was written with another codec stays readable.",
    )
    lossy: bool = Field(
        default=False,
        description="Chunks may come back from this tier as approximations. Without it lossy codecs are refused, and "
        "what they wrote is a miss.",
    )
    policy: Name = Field(default="lru", description="Eviction policy.")
    tenant_quota: TenantQuota = None
    tenant_quotas: TenantQuotas = Field(default_factory=dict)
    io_threads: Threads | None = Field(
        default=None,
        description="Calls to the backend at once. Left out: the backend's preferred concurrency, which is also "
        "the most.",
    )
    probe_deadline_s: PositiveSeconds = Field(
        default=2.0, description="Seconds within which the backend must say whether chunks are there; later is a miss."
    )
    read_deadline_s: PositiveSeconds = Field(
        default=10.0, description="Seconds for one read of a batch; later is a miss."
    )
    write_deadline_s: PositiveSeconds = Field(
        default=30.0, description="Seconds for one write of a batch; later has failed."
    )
    queue_bytes_max: Size = Field(
        default=256 * 1024**2,
        description="Bytes of host slots that may wait to be written to this tier; beyond it chunks are "
        "not written, and counted.",
    )
    queue_ops_max: Count = Field(default=4096, description="Operations that may wait for this tier; more are refused.")
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2, description="Further tries of an operation that failed with a retryable error, within its deadline."
    )
    breaker_failures: Count = Field(
        default=5,
        description="Failures in a row after which the tier is left alone: its chunks are misses, writes are dropped.",
    )
    breaker_cooldown_s: PositiveSeconds = Field(
        default=5.0, description="Seconds before a tier that was left alone is tried again."
    )
    probe_keys_max: Count = Field(default=1024, description="Chunks asked for in one probe.")
    presence_ttl_s: Seconds = Field(default=30.0, description="Seconds for which a shared tier's yes is believed.")
    absence_ttl_s: Seconds = Field(default=1.0, description="Seconds for which a shared tier's no is believed.")
    presence_keys_max: Count = Field(default=1_000_000, description="Answers of a shared tier that are remembered.")
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="Every other key of the table, as written; the backend's plugin checks them."
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, data: object) -> object:
        """Set apart the backend's options, and name the tier after its backend where it has no name."""
        if not isinstance(data, Mapping):
            return data
        common = {key: value for key, value in data.items() if key in TIER_KEYS}
        common["options"] = {key: value for key, value in data.items() if key not in TIER_KEYS}
        common.setdefault("name", _default_tier_name(common.get("backend")))
        return common


TIER_KEYS = frozenset(TierConfig.model_fields) - {"options"}
"""The keys that every tier's table understands; no backend may have an option of such a name."""


class LookupConfig(_Model):
    """Bounds of the answer to "how much of this prompt do you have?"."""

    deadline_s: PositiveSeconds = Field(
        default=5.0, description="Seconds after which a deferred request is answered with what is ready."
    )
    completions_per_step_max: Count = Field(default=256, description="Completions of I/O taken in per engine step.")
    recompute: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto`: a hit is cut where loading more of it is expected to take longer than computing it, once "
        "the tier's speed and the engine's prefill rate are known. `off`: all of it is loaded.",
    )
    load_tokens_min: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Hits of fewer tokens are not loaded. 0: all are."
    )


class StoreConfig(_Model):
    """What is stored, when, and how fast."""

    plan: Literal["immediate", "eager", "lazy"] = Field(
        default="immediate",
        description="When blocks are stored. `immediate`: in the step that completes a chunk. `eager`: a step later, "
        "when its tokens are certain; of a request that finds the host tier full, the part that fits. `lazy`: when the "
        "engine is about to reuse the blocks; the engine must show its free blocks, and `chunk.blocks` must be 1.",
    )
    policy: Literal["block_level", "request_level"] = Field(
        default="block_level",
        description="Whether chunks that were loaded for a request are stored again with it. `block_level`: no. "
        "`request_level`: yes, where the host tier has lost them meanwhile. A request chooses `request_level` with "
        "`do_remote_decode = true` in its `kv_transfer_params`.",
    )
    chunks_per_step_max: Count = Field(
        default=256,
        description="Chunks that one request offers for storing in one step, while it has more to offer than the step "
        "itself completes. What a step completes is offered in one go, up to a quarter of the host tier.",
    )
    prompt_only: bool = Field(default=False, description="Store chunks of prompts only, not of generated tokens.")


class EventsConfig(_Model):
    """What the engine is told about chunks that came and went."""

    enabled: bool = Field(
        default=True, description="Keep events for the engine. Observers among the plugins hear of them in any case."
    )
    self_describing: bool = Field(
        default=False,
        description="Events carry tokens, parent and all hashes of their blocks. Takes memory: about 5 KiB per chunk.",
    )
    payloads_max: Count = Field(
        default=100_000, description="Chunks whose tokens are remembered for that; beyond it the oldest are forgotten."
    )


class RecordConfig(_Model):
    """A record of what the stack does, for `tierkv explain`. Off, and free of cost, unless `path` is given."""

    path: Name | None = Field(
        default=None,
        description="File that takes one JSON line per event; a file of its own for each process. Left out: no record.",
    )
    bytes_max: Annotated[int, BeforeValidator(parse_size), Field(ge=65_536)] = Field(
        default=64 * 1024**2, description="Size at which a new file is begun; at least 64 KiB."
    )
    keep: Annotated[int, Field(ge=0, le=100)] = Field(
        default=1, description="Older files kept beside the newest, as `path.1`, `path.2` and so on."
    )


class StackConfig(_Model):
    """A whole stack, top to bottom."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    namespace: NamespaceConfig = Field(default_factory=NamespaceConfig)
    chunk: ChunkConfig = Field(default_factory=ChunkConfig)
    tenants: TenantsConfig = Field(default_factory=TenantsConfig)
    host: HostConfig = Field(description="Required: a stack has a host tier.")
    tiers: Annotated[tuple[TierConfig, ...], Field(strict=False)] = Field(
        default=(), description="The tiers below the host tier, fastest first."
    )
    lookup: LookupConfig = Field(default_factory=LookupConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    record: RecordConfig = Field(default_factory=RecordConfig)

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        first: dict[str, int] = {}
        for index, tier in enumerate(tiers):
            if tier.name in first:
                raise PydanticCustomError(
                    "tier_name_twice",
                    "tiers[{first}] has this name too; give each tier its own `name`",
                    {"first": first[tier.name], "index": index, "name": tier.name},
                )
            first[tier.name] = index
        return tiers
