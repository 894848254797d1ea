"""Any value of JSON: a namespace, or hints and faults; any bytes as a key."""

from __future__ import annotations

import json
from pathlib import Path

from parser_inputs import any_bytes, any_json, parser_test

from tierkv.types.hints import HINTS, parse_hints
from tierkv.types.keys import make_key, make_scope, scope_of_key, split_key, tenant_of
from tierkv.types.namespace import Namespace

HERE = Path(__file__).parent
GROUPS = ((16, (4096, 4096), "full_attention", None), (16, (512,), "sliding_window", 1024))
NAMESPACE = Namespace("m", "r", "bfloat16", "page", GROUPS, 4, 16, replica=2)
PARAMS = {
    "max_offload_tokens": 5,
    HINTS: {"load_tiers": ["host"], "store": False, "ttl_s": 6.5, "continues": "yes", "session": "s", "priority": -3},
}


@parser_test(HERE / "corpus" / "namespace", any_json([NAMESPACE.describe()]))
def test_any_description_is_a_namespace_or_refused(data: bytes) -> None:
    """Manifests are read from places that others write: a description is that of one namespace, or none."""
    try:
        described = json.loads(data)
    except (ValueError, RecursionError):
        return
    assert NAMESPACE.is_other_division(described) in {True, False}
    try:
        found = Namespace.from_description(described)
    except ValueError:
        return
    assert len(found.fingerprint()) == 16
    assert found.payload_bytes_max > 0
    assert Namespace.from_description(json.loads(json.dumps(found.describe()))) == found


@parser_test(HERE / "corpus" / "hints", any_json([PARAMS]))
def test_any_parameters_are_hints_and_faults(data: bytes) -> None:
    """Users of an engine's API write them: a wrong one is ignored and named, and the request goes on."""
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return
    for tiers in (None, ("host", "disk")):
        hints, faults = parse_hints(params, tiers)
        assert hash(hints) is not None
        assert all(len(fault.message) < 2000 for fault in faults)


@parser_test(
    HERE / "corpus" / "key", any_bytes([make_key(bytes(32), 1), make_key(b"h", 7, make_scope("salt", "lora"))])
)
def test_any_bytes_are_a_key_or_too_short(data: bytes) -> None:
    """Keys come back from stores by name: each has one tenant and one scope, and splits as it was joined."""
    scope = scope_of_key(data)
    assert scope.tenant == tenant_of(data)
    try:
        chunk_hash, group = split_key(data)
    except ValueError:
        return
    assert data.endswith(make_key(chunk_hash, group))
