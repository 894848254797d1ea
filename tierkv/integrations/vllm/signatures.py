"""Inspection of vLLM's interfaces: whether its calls fit our methods, and whether what we read and call exists.

Used at start for versions of vLLM that are unknown to this version of tierkv. Imports vLLM in calls only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

Kind = inspect._ParameterKind  # noqa: SLF001 - the type of Parameter.kind has no public name
_NAMED = (Kind.POSITIONAL_OR_KEYWORD, Kind.KEYWORD_ONLY)

BASES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics",
    "vllm.v1.kv_offload.base:OffloadingSpec",
    "vllm.v1.kv_offload.base:OffloadingManager",
    "vllm.v1.kv_offload.base:OffloadingWorker",
)
"""Classes of vLLM that the adapters implement, as ``module:name``."""

READ: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.request:Request": (
        *("request_id", "num_tokens", "num_prompt_tokens", "all_token_ids", "block_hashes", "cache_salt"),
        *("lora_request", "kv_transfer_params", "num_in_flight_tokens", "resumable", "skip_reading_prefix_cache"),
        *("prefill_stats", "num_preemptions", "num_computed_tokens", "mm_features", "trace_headers", "prompt_embeds"),
    ),
    "vllm.v1.metrics.stats:PrefillStats": (
        *("num_prompt_tokens", "num_cached_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("finished_req_ids", "preempted_req_ids"),
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("blocks",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "block_hash", "is_null"),
    "vllm.v1.outputs:KVConnectorOutput": ("kv_connector_worker_meta", "finished_recving"),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheTensor": ("layers", "layer_stride", "block_stride", "offset"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        "layer_names",
        "kv_cache_spec",
        "host_resident",
        "enable_kv_transfer",
    ),
    "vllm.v1.kv_offload.config:OffloadingConfig": (
        *("groups", "worker_kv_bytes_per_block", "extra_config", "engine_id", "model", "cache", "parallel"),
        *("kv_cache_layout", "canonical_layout"),
    ),
    "vllm.v1.kv_offload.base:ReqContext": ("req_id", "kv_transfer_params", "load_tier_filter"),
    "vllm.v1.kv_offload.base:ScheduleEndContext": ("new_req_ids", "preempted_req_ids"),
    "vllm.v1.kv_offload.base:GPULoadStoreSpec": ("block_ids", "group_sizes", "block_indices"),
}
"""Attributes that the adapters read, by class of vLLM."""

CALLED: Mapping[str, int] = {
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes": 2,
    "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash": 1,
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": 4,
    "vllm.v1.core.kv_cache_utils:to_event_extra_keys": 1,
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_kind": 1,
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window": 1,
    "vllm.v1.kv_offload.base:ReqContext.get_offload_key_position": 2,
    "vllm.v1.kv_offload.base:ReqContext.get_state": 2,
    "vllm.v1.kv_offload.base:ReqContext.set_state": 2,
    "vllm.v1.kv_offload.base:PrepareStoreOutput": 3,
    "vllm.v1.kv_offload.base:TransferResult": 4,
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults": 3,
    "vllm.v1.metrics.stats:PrefillStats.set": 4,
    "vllm.config:ModelConfig.get_total_num_kv_heads": 1,
    "vllm.config:ModelConfig.using_transformers_backend": 1,
    "vllm.config:get_current_vllm_config": 0,
    "vllm.distributed:get_tensor_model_parallel_rank": 0,
}
"""Functions and classes of vLLM that the adapters call, with the number of arguments (a method's first one is self)."""


def misfits() -> list[str]:
    """List how calls that vLLM makes would not fit the adapters' classes loaded in this process, one line each."""
    return [line for base in BASES for line in _misfits_of_base(base)]


def _misfits_of_base(path: str) -> Iterator[str]:
    try:
        base = _found(path)
    except (ImportError, AttributeError):
        yield f"{path} is missing"
        return
    for ours in base.__subclasses__():
        if ours.__module__.startswith("tierkv."):
            yield from misfits_of_class(base, ours)


def misfits_of_class(base: type, ours: type) -> Iterator[str]:
    """Compare a class with the abstract one of vLLM, as that one says it will be used; one line per problem.

    Args:
        base: vLLM's class.
        ours: the implementation.
    """
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{base.__name__}.{name} is new, and required"
    mine = dict(functions(ours))
    for name, theirs in functions(base):
        if name != "__init__" and name in mine:
            yield from (f"{base.__name__}.{name}: ours {problem}" for problem in misfits_of_call(theirs, mine[name]))
    for name in dir(base):
        if not name.startswith("_"):
            kinds = [type(inspect.getattr_static(kind, name)) for kind in (base, ours)]
            if any((kind in {property, classmethod, staticmethod}) and kinds[0] != kinds[1] for kind in kinds):
                yield f"{base.__name__}.{name} is a {kinds[0].__name__}, ours a {kinds[1].__name__}"


def functions(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that a class defines, or inherits from a class other than ``object``; unbound."""
    for name in dir(kind):
        item = inspect.getattr_static(kind, name)
        function = item.__func__ if isinstance(item, classmethod | staticmethod) else item
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            yield name, function


def misfits_of_call(called: Callable[..., Any], defined: Callable[..., Any]) -> list[str]:
    """List why a call made for one signature would not fit another.

    Args:
        called: has the signature that callers know.
        defined: is called.
    """
    theirs, mine = inspect.signature(called).parameters, inspect.signature(defined).parameters
    takes_all = {parameter.kind for parameter in mine.values()}
    wrong = []
    for position, (name, parameter) in enumerate(theirs.items()):
        if parameter.kind in _NAMED and name not in mine and Kind.VAR_KEYWORD not in takes_all:
            wrong.append(f"has no parameter {name!r}")
        elif parameter.kind is Kind.POSITIONAL_OR_KEYWORD and name in mine and list(mine).index(name) != position:
            wrong.append(f"has parameter {name!r} at another position")
        elif parameter.kind in {Kind.VAR_KEYWORD, Kind.VAR_POSITIONAL} and parameter.kind not in takes_all:
            wrong.append(f"has no {parameter}")
        elif name in mine and parameter.default is not parameter.empty and mine[name].default is parameter.empty:
            wrong.append(f"requires {name!r}, which callers may omit")
    wrong += [
        f"requires {name!r}, which is not given"
        for name, parameter in mine.items()
        if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in theirs
    ]
    return wrong


def missing_names() -> list[str]:
    """List what the adapters read or call of vLLM, and what is missing or takes other arguments; one line each."""
    return [*_missing_attributes(READ), *_misfits_of_calls(CALLED)]


def _missing_attributes(read: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for path, names in read.items():
        try:
            known = _attributes(_found(path))
        except (ImportError, AttributeError):
            yield f"{path} is missing"
            continue
        yield from (f"{path} has no attribute {name!r}" for name in names if name not in known)


def _misfits_of_calls(called: Mapping[str, int]) -> Iterator[str]:
    for path, count in called.items():
        try:
            inspect.signature(_found(path)).bind(*[None] * count)
        except (ImportError, AttributeError):
            yield f"{path} is missing"
        except TypeError as error:
            yield f"{path} does not take {count} arguments: {error}"


def _found(path: str) -> Any:  # noqa: ANN401 - vLLM's, which has no types here
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _attributes(kind: type) -> set[str]:
    """Attributes of instances: those of the class, declared ones, and those that ``__init__`` assigns."""
    known = {*dir(kind), *getattr(kind, "__struct_fields__", ())}
    for base in kind.__mro__:
        known.update(inspect.get_annotations(base))
        code = getattr(base.__dict__.get("__init__"), "__code__", None)
        if isinstance(code, CodeType):
            known.update(code.co_names)
    return known
