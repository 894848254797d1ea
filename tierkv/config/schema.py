"""Schema of a stack description, as frozen values. Field descriptions become docs/reference/configuration.md.

A model checks each table by itself. :func:`tierkv.config.resolving.resolve` checks the names of backends, codecs and
policies, and the options of backends, against the installed plugins. The table of a tier, which is the longest, is in
:mod:`~tierkv.config.tier_schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tierkv.config.tier_schema import TierConfig
from tierkv.config.values import (
    Count,
    Name,
    PositiveSeconds,
    Seconds,
    Size,
    SpansTarget,
    Table,
    TenantQuota,
    TenantQuotas,
    Threads,
)


class NamespaceConfig(Table):
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


class ChunkConfig(Table):
    """Size of the unit in which a sequence is stored and loaded. Give `blocks` or `tokens`, not both."""

    blocks: Count | None = Field(
        default=None, description="GPU blocks of the engine per chunk. Default: 1, unless `tokens` is given."
    )
    tokens: Count | None = Field(
        default=None,
        description="Tokens per chunk; must be a multiple of the engine's GPU block, whose size all its groups share. "
        "Checked when the engine starts.",
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


class TenantsConfig(Table):
    """Tenants, identified by the `cache_salt` of their requests. Quotas are set per tier."""

    tracked_max: Count = Field(
        default=1024,
        description="Largest number of tenants with a quota of their own in each tier. Further tenants share one "
        "quota.",
    )


class HostConfig(Table):
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
        default=2,
        description="Threads of each worker that copy, or help the GPU copy, between GPU pages and host slots. While "
        "one waits for the interpreter, the other one copies. In host memory they share a load of 8 to 64 MiB.",
    )
    gpu_staging: Size = Field(
        default=128 * 1024**2,
        description="GPU memory of each worker for chunks in transfer, in four buffers; at least four chunks. None is "
        "used where the KV cache is in host memory.",
    )
    reserved_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="Largest share of the slots that waiting requests may reserve; stores have the rest."
    )


class LookupConfig(Table):
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


class StepConfig(Table):
    """Work that the stack does on the engine's thread in one engine step."""

    keys_max: Annotated[int, Field(ge=64, le=2**31 - 1)] = Field(
        default=1024,
        description="Largest number of chunk operations (look up, reserve, complete, release, evict) in one step; the "
        "rest follows in later steps. A larger number answers long prompts in fewer steps, each of which takes longer.",
    )
    rest_steps_max: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=7,
        description="Largest number of steps in a row in which tiers are left alone, while requests only decode and "
        "none waits for a tier; after a quarter of a second they are not. With the plan `immediate`, chunks that are "
        "completed meanwhile are stored together after these steps. 0: tiers are looked at in every step.",
    )


class StoreConfig(Table):
    """Selection, time and rate of stores."""

    plan: Literal["immediate", "eager", "lazy"] = Field(
        default="immediate",
        description="Time at which blocks are stored. `immediate`: in the step that completes a chunk, or after those "
        "in which tiers are left alone (`step.rest_steps_max`). `eager`: one step later, when its tokens are final; if "
        "the host tier is full, the part of the request that fits. `lazy`: before the engine reuses the blocks; the "
        "engine must show its free blocks, and `chunk.blocks` must be 1.",
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


class EventsConfig(Table):
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


class RecordConfig(Table):
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
    spans: SpansTarget | None = Field(
        default=None,
        description="Where spans of OpenTelemetry go: `program`, the tracer provider of the program, or the URL of a "
        "collector. Needs the extra `otel`: `pip install '.[otel]'` in a checkout. Default: none.",
    )


class LogConfig(Table):
    """Log lines of the stack, at the logger `tierkv.stack`."""

    interval_s: Seconds = Field(
        default=60.0,
        description="Shortest time in seconds between two lines about one event of one tier. The second one has the "
        "number of events between them.",
    )


class StackConfig(Table):
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
