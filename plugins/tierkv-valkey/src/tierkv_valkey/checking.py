"""Checks of a Valkey tier for ``tierkv check``.

Only a write shows whether a server may be written: a short value with a unique name is stored and removed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

from tierkv.abc import CheckResult
from tierkv.types.sizes import round_size
from tierkv_valkey.failures import FIXES, Failure, FailureKind
from tierkv_valkey.nodes.asking import ask, ask_one
from tierkv_valkey.nodes.directory import Directory
from tierkv_valkey.nodes.node import Node
from tierkv_valkey.opening import open_directory
from tierkv_valkey.options import CREDENTIALS, ValkeyOptions

CHECK_TTL_S = b"60"
EVICTS = ("allkeys-lru", "allkeys-lfu", "allkeys-random")
EVICTS_EXPIRING = ("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")
SETTINGS = (b"save", b"appendonly", b"cluster-require-full-coverage")


def check(options: ValkeyOptions, _capacity_bytes: int | None) -> Iterator[CheckResult]:
    """Check login, reachability, permission to write, and the settings of every node."""
    yield _check_login(options)
    directory: Directory | None = None
    try:
        directory = open_directory(options)
        nodes = list(directory.nodes())
        yield from _check_access(directory, nodes, options)
    except Exception as error:  # noqa: BLE001  the check reports any error of the client
        yield _failed("access", error)
    finally:
        if directory is not None:
            directory.close()


def _check_login(options: ValkeyOptions) -> CheckResult:
    user = f"user {options.username!r}" if options.username else "the default user"
    source = options.password_file or options.password_env
    try:
        if options.password():
            return CheckResult("login", ok=True, detail=f"{user}, password from {source}")
    except OSError as error:
        return CheckResult("login", ok=False, detail=f"{source}: {error.strerror}", fix="make the file readable")
    detail = f"no password: {source} {'is empty' if options.password_file else 'is not set in the environment'}"
    if options.username:
        return CheckResult("login", ok=False, detail=f"{user}, {detail}", fix=CREDENTIALS)
    return CheckResult("login", ok=True, detail=detail)


def _check_access(directory: Directory, nodes: Sequence[Node], options: ValkeyOptions) -> Iterator[CheckResult]:
    reached = {}
    for node in nodes:
        try:
            reached[node] = _information(ask_one(node, options.timeout_s, (b"INFO",)))
        except Exception as error:  # noqa: BLE001  as above
            yield _failed(f"access to {node}", error)
    if not reached:
        return
    versions = sorted({_version(info) for info in reached.values()})
    found = ", ".join(str(node) for node in reached)
    yield CheckResult("access", ok=True, detail=f"{found} ({options.mode}) answers: {', '.join(versions)}")
    yield _check_write(directory, options)
    for node, info in reached.items():
        yield from _check_node(node, info, options)


def _check_write(directory: Directory, options: ValkeyOptions) -> CheckResult:
    name = f"{options.prefix}:check:{uuid.uuid4().hex}".encode()
    try:
        node = directory.node_of(name)
        set_, get, unlink = (b"SET", name, b"tierkv check", b"EX", CHECK_TTL_S), (b"GET", name), (b"UNLINK", name)
        replies = ask(node, options.timeout_s, set_, get, (b"EXISTS", name), unlink)
    except Exception as error:  # noqa: BLE001  as above
        return _failed("write", error)
    refused = next((reply for reply in replies if isinstance(reply, Exception)), None)
    if refused is not None:
        return _failed("write", refused)
    return CheckResult("write", ok=True, detail=f"a short value was stored at {node}, read and removed")


def _check_node(node: Node, info: Mapping[str, str], options: ValkeyOptions) -> Iterator[CheckResult]:
    if info.get("role", "master") != "master":
        fix = FIXES[FailureKind.REPLICA]
        yield CheckResult(f"role of {node}", ok=False, detail="a replica, which cannot be written", fix=fix)
    yield _check_memory(node, info, options)
    replies = ask(node, options.timeout_s, *((b"CONFIG", b"GET", name) for name in SETTINGS))
    settings = {
        name.decode(): _value(reply) for name, reply in zip(SETTINGS, replies, strict=True) if isinstance(reply, list)
    }
    if not settings:
        detail = "CONFIG GET is refused to this user, so these settings are unknown"
        fix = 'look at save ("" is best), appendonly (no) and cluster-require-full-coverage (no) yourself'
        yield CheckResult(f"settings of {node}", ok=True, detail=detail, fix=fix, warns=True)
        return
    yield _check_persistence(node, settings)
    if options.mode == "cluster":
        yield _check_coverage(node, settings)


def _check_memory(node: Node, info: Mapping[str, str], options: ValkeyOptions) -> CheckResult:
    subject = f"memory of {node}"
    bound, policy = int(info.get("maxmemory", "0")), info.get("maxmemory_policy", "unknown")
    used = f"{round_size(int(info.get('used_memory', '0')))} used"
    if not bound:
        fix = 'set maxmemory on the server, and maxmemory-policy to "allkeys-lru"'
        detail = f"{used}, no maxmemory: chunks may fill the machine"
        return CheckResult(subject, ok=True, detail=detail, fix=fix, warns=True)
    detail = f"{used} of {round_size(bound)}, maxmemory-policy {policy}"
    if policy in EVICTS or (policy in EVICTS_EXPIRING and options.ttl_s is not None):
        return CheckResult(subject, ok=True, detail=detail)
    why = "chunks have no expiry" if policy in EVICTS_EXPIRING else "a full server refuses to store"
    fix = f"{FIXES[FailureKind.FULL].partition(', or')[0]}{', or set ttl_s' if policy in EVICTS_EXPIRING else ''}"
    return CheckResult(subject, ok=True, detail=f"{detail}: {why}", fix=fix, warns=True)


def _check_persistence(node: Node, settings: Mapping[str, str]) -> CheckResult:
    subject = f"persistence of {node}"
    save, log = settings.get("save", ""), settings.get("appendonly", "no")
    if not save and log != "yes":
        return CheckResult(subject, ok=True, detail="off, as suits a cache")
    detail = f"save {save!r}, appendonly {log}: every snapshot copies memory, and a failed one stops all writes"
    fix = 'set save to "" and appendonly to no; the tier promises no durability'
    return CheckResult(subject, ok=True, detail=detail, fix=fix, warns=True)


def _check_coverage(node: Node, settings: Mapping[str, str]) -> CheckResult:
    subject = f"slots of {node}"
    if settings.get("cluster-require-full-coverage") == "no":
        return CheckResult(subject, ok=True, detail="the others are served when one node fails")
    detail = "cluster-require-full-coverage is yes: one dead node stops all others"
    return CheckResult(subject, ok=True, detail=detail, fix="set cluster-require-full-coverage to no", warns=True)


def _failed(subject: str, error: Exception) -> CheckResult:
    failure = Failure.of(error)
    return CheckResult(subject, ok=False, detail=f"{failure.kind.value} ({failure.detail})", fix=FIXES[failure.kind])


def _information(reply: object) -> dict[str, str]:
    text = reply.decode() if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _version(info: Mapping[str, str]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'of an unknown version')}"


def _value(reply: list[bytes]) -> str:
    return reply[1].decode() if len(reply) > 1 else ""
