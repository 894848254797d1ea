"""Schema of a stack description, as frozen values. Field descriptions become docs/reference/configuration.md.

A model checks each table by itself. :func:`tierkv.config.resolving.resolve` checks the names of backends, codecs and
policies, and the options of backends, against the installed plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tierkv.config.values import Count, Name, PositiveSeconds, Seconds, Size, Threads, TierName, default_tier_name


class _Model(BaseModel):
    """Strict model: a number in quotes, true in place of 1, or an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NamespaceConfig(_Model):
    """Facts that make KV bytes interchangeable, beside those of the engine (dtype, layout, block sizes, rank)."""

    model: Name | None = Field(
        default=None,
        description="Name of the model. Default: the name given by the engine. Set it to share a cache between "
        "engines that use different names for one model.",
    )
    revision: str | None = Field(
        default=None, description="Revision of the weights. Default: the one given by the engine."
    )
    epoch: str = Field(
        default="0",
        description="Any text. Change it when weights change under the same name: older chunks become unreachable.",
    )


class ChunkConfig(_Model):
    """Size of the unit in which a sequence is stored and loaded. Give `blocks` or `tokens`, not both."""

    blocks: Count | None = Field(
        default=None, description="GPU blocks of the engine per chunk. Default: 1, unless `tokens` is given."
    )
    tokens: Count | None = Field(
        default=None,
        description="Tokens per chunk; must be a multiple of the engine's GPU block. Checked when the engine starts.",
    )
    parts: Count | None = Field(
        default=None,
        description="Parts that each chunk is divided in by heads. Engines of one model with different numbers of "
        "tensor parallel workers use the same chunks if `parts` is equal, and a multiple of these numbers. Default: "
        "the number of workers. Checked when the engine starts.",
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
    """Tenants, identified by the `cache_salt` of their requests. Quotas are set per tier."""

    tracked_max: Count = Field(
        default=1024,
        description="Largest number of tenants with a quota of their own in each tier. Further tenants share one "
        "quota.",
    )


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


class HostConfig(_Model):
    """The host tier: pinned CPU memory, the only tier that GPU copies use."""

    capacity: Size = Field(description="Memory for chunks, allocated at start.")
    populate: bool = Field(default=True, description="Provide its pages in the background, while memory is left.")
    policy: Name = Field(default="lru", description="Eviction policy.")
    verify: bool = Field(
        default=True,
        description="Verify the checksum of every chunk when it is copied from host memory to the GPU. Frames read "
        "from lower tiers are always verified.",
    )
    tenant_quota: TenantQuota = None
    tenant_quotas: TenantQuotas = Field(default_factory=dict)
    copy_threads: Threads = Field(
        default=1,
        description="Threads of each worker that copy, or help the GPU copy, between GPU pages and host slots.",
    )
    gpu_staging: Size = Field(
        default=128 * 1024**2,
        description="GPU memory of each worker for chunks in transfer, in four buffers; at least four chunks. None is "
        "used where the KV cache is in host memory.",
    )
    reserved_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="Largest share of the slots that waiting requests may reserve; stores have the rest."
    )


class CodecConfig(_Model):
    """A codec: its name, or a table with its name and options."""

    ALLOWED: ClassVar[str] = 'the name of a codec in quotes, or a table such as { name = "zstd", level = 3 }'

    name: Name = Field(description="Name of the codec; `tierkv plugins` lists the installed ones.")
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="All other keys of the table, checked by the codec's plugin."
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, data: object) -> object:
        """Convert a plain name to a table, and separate the codec's options from the other keys."""
        if isinstance(data, str):
            return {"name": data}
        if not isinstance(data, Mapping):
            return data
        named = {"name": data["name"]} if "name" in data else {}
        return named | {"options": {key: value for key, value in data.items() if key != "name"}}


class TierConfig(_Model):
    """One tier below the host tier. Keys that are not listed here are options of its backend."""

    name: TierName = Field(description="Name in messages, metrics and events. Must be unique.")
    backend: Name = Field(description="Name of the backend; `tierkv plugins` lists the installed ones.")
    capacity: Size | None = Field(
        default=None,
        description="Largest sum of frames in bytes, enforced by eviction. Required for backends that are bounded and "
        "not shared; refused for shared ones.",
    )
    write: Literal["through", "on_reuse", "back", "read_only"] = Field(
        default="through",
        description="Time at which chunks are written to the tier. `through`: as soon as the host tier has them. "
        "`on_reuse`: when they are requested again. `back`: before the host tier evicts them. `read_only`: never.",
    )
    seen_keys_max: Count = Field(
        default=1_000_000,
        description="Largest number of chunks remembered as seen once, for `on_reuse`. They are remembered beyond "
        "their eviction from the host tier; 8 bytes each.",
    )
    codec: CodecConfig = Field(
        default=CodecConfig(name="none"),
        description='Stored form of payloads: a name, or `{ name = "zstd", level = 3 }` with options. Chunks '
        "written with another codec stay readable.",
    )
    lossy: bool = Field(
        default=False,
        description="Whether chunks read from this tier may be approximations. If not, lossy codecs are refused, and "
        "chunks written with them are misses.",
    )
    accept_clear: bool = Field(
        default=False,
        description="Whether an encrypted tier reads frames in the clear, which a user who may write to its storage "
        "can forge. If not, they are misses and deleted. Set it while a tier is moved to encryption.",
    )
    own_buffers: bool | None = Field(
        default=None,
        description="Whether frames are read into buffers of their own and copied to the host tier, so that a backend "
        "that writes after its call returned changes no chunk. Default: unless the backend declares "
        "`reads_end_with_call`.",
    )
    policy: Name = Field(default="lru", description="Eviction policy.")
    tenant_quota: TenantQuota = None
    tenant_quotas: TenantQuotas = Field(default_factory=dict)
    io_threads: Threads | None = Field(
        default=None,
        description="Largest number of concurrent calls to the backend. Default: the backend's preferred concurrency, "
        "which is also the limit.",
    )
    required: bool = Field(
        default=False,
        description="Whether the stack refuses to open without this tier. If not, a tier that cannot be opened is left "
        "out, logged as an error, and tried again until it opens. A place that holds other data (another program, "
        "format or namespace) is always refused.",
    )
    open_deadline_s: PositiveSeconds = Field(
        default=60.0,
        description="Seconds that the stack waits for the backend when it opens. All tiers are opened side by side. "
        "After that the tier cannot be opened: see `required`. Rebuilding the lost index of a large tier takes long; "
        "the time for listing its chunks is not included.",
    )
    probe_deadline_s: PositiveSeconds = Field(
        default=2.0, description="Seconds for one probe of a batch. After that chunks without an answer are misses."
    )
    read_deadline_s: PositiveSeconds = Field(
        default=10.0, description="Seconds for one read of a batch. After that the chunks are misses."
    )
    write_deadline_s: PositiveSeconds = Field(
        default=30.0, description="Seconds for one write of a batch. After that the write has failed."
    )
    queue_bytes_max: Size = Field(
        default=256 * 1024**2,
        description="Largest number of bytes in host slots that are queued for writing to this tier. Further chunks "
        "are not written, and are counted.",
    )
    queue_ops_max: Count = Field(
        default=4096, description="Largest number of operations queued for this tier. Further ones are refused."
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2, description="Retries of an operation that failed with a retryable error, within its deadline."
    )
    breaker_failures: Count = Field(
        default=5,
        description="Consecutive failures that open the circuit breaker: the tier's chunks are misses and writes are "
        "dropped.",
    )
    breaker_cooldown_s: PositiveSeconds = Field(
        default=5.0, description="Seconds before a tier with an open breaker is tried again."
    )
    probe_keys_max: Count = Field(
        default=1024, description="Largest number of chunks per probe. A slow tier gets fewer."
    )
    presence_ttl_s: Seconds = Field(
        default=30.0, description="Seconds for which a shared tier's answer that it has a chunk is cached."
    )
    absence_ttl_s: Seconds = Field(
        default=1.0, description="Seconds for which a shared tier's answer that it lacks a chunk is cached."
    )
    presence_keys_max: Count = Field(
        default=1_000_000, description="Largest number of cached answers of a shared tier at the begin of a step."
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="All other keys of the table, checked by the backend's plugin."
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_keys(cls, data: object) -> object:
        """Separate the backend's options from the other keys, and derive the tier's name where it has none."""
        if not isinstance(data, Mapping):
            return data
        common = {key: value for key, value in data.items() if key in TIER_KEYS}
        common["options"] = {key: value for key, value in data.items() if key not in TIER_KEYS}
        common.setdefault("name", default_tier_name(common.get("backend")))
        return common


TIER_KEYS = frozenset(TierConfig.model_fields) - {"options"}
"""Keys of every tier's table. No backend may have an option of the same name."""


class LookupConfig(_Model):
    """Bounds of lookups, which determine the part of a prompt that can be loaded."""

    deadline_s: PositiveSeconds = Field(
        default=5.0,
        description="Seconds without progress after which a tier is late: a request that waits for it is answered "
        "with the chunks that are ready. A queue that moves, and an engine that is silent, do not count.",
    )
    read_ahead: bool = Field(
        default=True,
        description="Whether chunks of requests that wait in the engine's queue are read before the engine asks: in "
        "order of arrival, up to a quarter of `host.reserved_share`, and only while at most 5 % were read for nothing.",
    )
    recompute: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto`: a hit is shortened where loading more of it is expected to take longer than computing it, "
        "once the tier's speed and the engine's prefill rate are known. `off`: the whole hit is loaded.",
    )
    load_tokens_min: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Hits of fewer tokens are not loaded. 0: all hits are loaded."
    )


class StepConfig(_Model):
    """Work that the stack does on the engine's thread in one engine step."""

    keys_max: Annotated[int, Field(ge=64, le=2**31 - 1)] = Field(
        default=1024,
        description="Largest number of chunk operations (look up, reserve, complete, release, evict) in one step; the "
        "rest follows in later steps. A larger number answers long prompts in fewer steps, each of which takes longer.",
    )
    rest_steps_max: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=7,
        description="Largest number of steps in a row in which tiers are left alone, while requests only decode and "
        "none waits for a tier; after a quarter of a second they are not. 0: tiers are looked at in every step.",
    )


class StoreConfig(_Model):
    """Selection, time and rate of stores."""

    plan: Literal["immediate", "eager", "lazy"] = Field(
        default="immediate",
        description="Time at which blocks are stored. `immediate`: in the step that completes a chunk. `eager`: one "
        "step later, when its tokens are final; if the host tier is full, the part of the request that fits. `lazy`: "
        "before the engine reuses the blocks; the engine must show its free blocks, and `chunk.blocks` must be 1.",
    )
    policy: Literal["block_level", "request_level"] = Field(
        default="block_level",
        description="Whether chunks that were loaded for a request are stored again with it. `block_level`: no. "
        "`request_level`: yes, where the host tier has evicted them meanwhile. A request selects `request_level` with "
        "`do_remote_decode = true` in its `kv_transfer_params`.",
    )
    chunks_per_step_max: Count = Field(
        default=256,
        description="Largest number of chunks that one request offers for storing in one step, where it has more than "
        "the step completes. The chunks that a step completes are offered at once, up to a quarter of the host tier.",
    )
    prompt_only: bool = Field(default=False, description="Store chunks of prompts only, not of generated tokens.")


class EventsConfig(_Model):
    """Events about stored and removed chunks, for the engine."""

    enabled: bool = Field(
        default=True, description="Keep events for the engine. Observers of plugins receive them in any case."
    )
    self_describing: bool = Field(
        default=False,
        description="Events carry tokens, parent and all hashes of their blocks. Needs about 5 KiB of memory per "
        "chunk.",
    )
    payloads_max: Count = Field(
        default=100_000,
        description="Largest number of chunks whose tokens are remembered for such events. The oldest are forgotten.",
    )
    tokens_path: Name | None = Field(
        default=None,
        description="File that keeps these tokens, about 1.5 KiB per chunk of 256 tokens, so that a restarted engine "
        "announces what its local tiers hold. Each process needs its own file. Needs `self_describing`. Default: none.",
    )


class RecordConfig(_Model):
    """Record of the stack's decisions, for `tierkv explain`, and spans. Off, without cost, unless they are given."""

    path: Name | None = Field(
        default=None,
        description="File with one JSON line per event. Each process needs its own file. Default: no record.",
    )
    bytes_max: Annotated[Size, Field(ge=65_536)] = Field(
        default=64 * 1024**2, description="Size at which a new file is started; at least 64 KiB."
    )
    keep: Annotated[int, Field(ge=0, le=100)] = Field(
        default=1, description="Number of older files that are kept, as `path.1`, `path.2` and so on."
    )
    spans: Name | None = Field(
        default=None,
        description="Where spans of OpenTelemetry go: `program`, the tracer provider of the program, or the URL of a "
        "collector. Needs `tierkv[otel]`. Default: none.",
    )


class LogConfig(_Model):
    """Log lines of the stack, at the logger `tierkv.stack`."""

    interval_s: Seconds = Field(
        default=60.0,
        description="Shortest time in seconds between two lines about one event of one tier. The second one has the "
        "number of events between them.",
    )


class StackConfig(_Model):
    """A whole stack."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    namespace: NamespaceConfig = Field(default_factory=NamespaceConfig)
    chunk: ChunkConfig = Field(default_factory=ChunkConfig)
    tenants: TenantsConfig = Field(default_factory=TenantsConfig)
    host: HostConfig = Field(description="Required, because every stack has a host tier.")
    tiers: Annotated[tuple[TierConfig, ...], Field(strict=False)] = Field(
        default=(), description="Lower tiers, fastest first."
    )
    lookup: LookupConfig = Field(default_factory=LookupConfig)
    step: StepConfig = Field(default_factory=StepConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    record: RecordConfig = Field(default_factory=RecordConfig)
    log: LogConfig = Field(default_factory=LogConfig)

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
