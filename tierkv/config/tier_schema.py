"""Schema of one tier and its codec in a stack description; see :mod:`~tierkv.config.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from tierkv.config.values import (
    Count,
    Name,
    PositiveSeconds,
    Seconds,
    Size,
    Table,
    TenantQuota,
    TenantQuotas,
    Threads,
    TierName,
    default_tier_name,
)


class CodecConfig(Table):
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


class TierConfig(Table):
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
        default=2.0,
        description="Seconds for one probe of a batch. After that chunks without an answer are misses. A tier that is "
        "out of service is tried with a probe; a failure of any operation that took as long counts as late.",
    )
    read_deadline_s: PositiveSeconds = Field(
        default=10.0,
        description="Seconds for one read of a batch. After that the chunks are misses. Time in a queue that moves "
        "does not count, here and in the other deadlines.",
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
        default=4096,
        description="Largest number of operations queued for this tier. Further writes and deletions are "
        "refused; further reads wait until others have ended, and do not count writes.",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=2, description="Retries of an operation that failed with a retryable error, within its deadline."
    )
    breaker_failures: Count = Field(
        default=5,
        description="Consecutive failures that open the circuit breaker: the tier's chunks are misses and writes are "
        "dropped. An operation that failed late, or missed its deadline, counts as three if the tier answered nothing "
        "meanwhile. Reads are also counted on their own: if this number fails in a row, the tier is out of service.",
    )
    breaker_cooldown_s: PositiveSeconds = Field(
        default=5.0,
        description="Longest time in seconds before a tier with an open breaker, or one that could not be opened, is "
        "tried again. The first trial of an outage follows after an eighth of it, each further one after 1.25 times "
        "the previous time. A tier that served for less than this time waits twice as long as at the end of its last "
        "outage.",
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
