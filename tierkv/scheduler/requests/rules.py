"""Rules for an engine's calls, checked before anything changes. Each error names the request and the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierkv.errors import EngineProtocolError, wrong_value
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.engine import BlockTables, Request
from tierkv.types.geometry import Geometry
from tierkv.types.keys import GROUP_BYTES, Key
from tierkv.types.transfers import NO_REQUEST, WorkerOutput


def refused(request_id: str, why: str) -> EngineProtocolError:
    """Error of a call that broke a rule. ``why`` continues "request 'id'"."""
    return EngineProtocolError(f"request {request_id!r}{why}", request_id=request_id)


HASHES_CHECKED_MAX = 8_192
"""Hashes of a prompt that one call checks: a millisecond's work. Of a longer prompt, later calls check the rest."""


def check_hashes(record: RequestRecord, hashes_max: int | None = None) -> None:
    """Check the hashes that have become known since the last call.

    Hashes are chained, so none repeats within a request: a chunk would get the KV bytes of another one. Repetitions are
    looked for among the new hashes and the last known one, so that a step costs nothing for the old ones.

    hashes_max: number of hashes to check, of those that have become known together; the next calls check the others.
    Keys are made of checked hashes only (:meth:`RequestRecord.extend_keys`). None: all.

    Raises:
        EngineProtocolError: one of them is not bytes, is empty, or repeats another one. Names its index.
    """
    hashes: Sequence[object] = record.request.block_hashes
    count = len(hashes)
    if count <= record.checked_hashes:
        return
    first = max(0, record.checked_hashes - 1)
    stop = count if hashes_max is None else min(count, record.checked_hashes + hashes_max)
    new, earlier = hashes[first:stop], record.hashes_checked_so_far
    if set(map(type, new)) != {bytes} or not all(new) or len(unique := set(new)) != len(new):
        _find_fault(record.ctx.request_id, new, first)
    if earlier and not earlier.isdisjoint(new[1:]):
        _find_fault(record.ctx.request_id, hashes[:stop], 0)
    if stop < count:
        earlier |= unique
    elif earlier:
        record.hashes_checked_so_far = set()
    record.checked_hashes = stop


def check_same_request(record: RequestRecord, request: Request) -> None:
    """Check that a request is the live one of its id, or continues the prompt of that one.

    Hashes are chained, so one of them shows all before it. A session may go on with a longer prompt.

    Raises:
        EngineProtocolError: the first one has finished; or this one has another prompt, or a shorter one, which would
            get the KV bytes of the first one.
    """
    if record.state is RequestState.FINISHED:
        raise refused(record.ctx.request_id, " has finished and still has transfers in flight: use another id")
    if request is record.request:
        return
    known = record.request.block_hashes
    try:
        hashes = request.block_hashes
        shared = min(len(known), len(hashes))
        is_shorter = request.num_prompt_tokens < record.request.num_prompt_tokens
        differs = shared and known[shared - 1] != hashes[shared - 1]
    except (AttributeError, TypeError, LookupError) as error:
        raise refused(record.ctx.request_id, f": {error}") from error
    if is_shorter or differs:
        why = " is alive, and came again with another prompt: give each request its own id, or report its end first"
        raise refused(record.ctx.request_id, why)


def _find_fault(request_id: str, hashes: Sequence[object], first: int) -> None:
    """Raise for the hash that breaks a rule. ``first``: index of the first one."""
    seen: dict[object, int] = {}
    for i, one in enumerate(hashes, first):
        if not isinstance(one, bytes) or not one:
            raise refused(request_id, f": block_hashes[{i}] is {one!r}: give bytes that are not empty")
        if one in seen:
            why = f": block_hashes[{i}] repeats block_hashes[{seen[one]}]: chain the hashes, so that none occurs twice"
            raise refused(request_id, why)
        seen[one] = i


def no_request(call: str, given: object) -> EngineProtocolError:
    """Error of a call about a foreign object, or about a request whose id is none."""
    if hasattr(given, "request_id"):
        return wrong_value(call, "request.request_id", given.request_id, "give a text")
    return wrong_value(call, "request", given, "give a request, whose request_id is a text")


def known(records: Mapping[str, RequestRecord], call: str, request: Request) -> RequestRecord | None:
    """Return the record of a request, or None.

    Raises:
        EngineProtocolError: it is a foreign object, or its id is none.
    """
    try:
        return records.get(request.request_id)
    except (AttributeError, TypeError) as error:
        raise no_request(call, request) from error


def check_id(call: str, request_id: object) -> None:
    """Check the id that a call is about.

    Raises:
        EngineProtocolError: it is no text.
    """
    if not isinstance(request_id, str):
        raise wrong_value(call, "request_id", request_id, "give the id of a request, a text")


def checked_step(call: str, prompt_tokens: object, started: Iterable[str], preempted: Iterable[str]) -> tuple[str, ...]:
    """Return the ids of requests that a step has changed, joined; of most steps there is none, and no token.

    Raises:
        EngineProtocolError: one of them cannot be an id, they are no collections, or the tokens are no whole number.
    """
    if not (prompt_tokens or started or preempted):
        return ()
    if not isinstance(prompt_tokens, int) or prompt_tokens < 0:
        raise wrong_value(call, "prompt_tokens", prompt_tokens, "give a whole number from 0 on")
    try:
        ids = (*started, *preempted)
        hash(ids)
    except TypeError as error:
        raise wrong_value(call, "requests", (started, preempted), "give collections of their ids") from error
    return ids


def check_question(call: str, request_id: object, end_token: object) -> None:
    """Check a question about a chunk.

    Raises:
        EngineProtocolError: the id is no text, or the token no whole number.
    """
    check_id(call, request_id)
    if not hasattr(end_token, "__index__"):
        raise wrong_value(call, "end_token", end_token, "give the number of tokens up to the end of the chunk")


def checked_keys(call: str, keys: Iterable[Key]) -> tuple[Key, ...]:
    """Return the keys of a call.

    Raises:
        EngineProtocolError: they are no keys: bytes with a hash before the number of the group.
    """
    try:
        given = tuple(keys)
    except TypeError as error:
        raise wrong_value(call, "keys", keys, "give the keys of chunks") from error
    if given and (set(map(type, given)) != {bytes} or min(map(len, given)) <= GROUP_BYTES):
        raise wrong_value(call, "keys", given, "give bytes: a hash, then the number of the group")
    return given


_FORMS = ("__index__", "__iter__", "items", "__iter__")
"""An attribute of the values in each field of a report, in order."""


def check_report(output: WorkerOutput) -> None:
    """Check the form of a report of workers, which may have come from another process.

    Raises:
        EngineProtocolError: it is none, or one of its fields is of a wrong form.
    """
    if not isinstance(output, WorkerOutput):
        raise EngineProtocolError(f"update_connector_output: {output!r:.80} is no report of a worker")
    fields = (output.finished, output.failed_keys, output.parts, output.transfers)
    for attribute, field in zip(_FORMS, fields, strict=True):
        if field != {} and not _has_form(field, attribute):
            raise wrong_value(
                "update_connector_output", "field of the report", field, "give what get_finished returned"
            )


def _has_form(field: Any, attribute: str) -> bool:  # noqa: ANN401 - it may be anything
    """Whether a field is a mapping, and its values have an attribute. Without a call where none is needed."""
    if field.__class__ is not dict and not hasattr(field, "values"):
        return False
    for value in field.values():  # noqa: SIM110 - for each report: all() makes a generator
        if not hasattr(value, attribute):
            return False
    return True


def check_hashes_now(call: str, request: Request) -> None:
    """Check a request whose keys are made at once.

    Raises:
        EngineProtocolError: it breaks a rule of :func:`check_new_request`, or one of its hashes is empty or not bytes.
    """
    check_new_request(call, request)
    hashes: Sequence[object] = request.block_hashes
    if not set(map(type, hashes)) <= {bytes} or not all(hashes):
        _find_fault(request.request_id, hashes, 0)


def check_new_request(call: str, request: Request) -> None:
    """Check the id of a new request, its lengths, and whether it has hashes and parameters: all that is read later.

    Raises:
        EngineProtocolError: the id is no text, or empty; a length is no whole number; the hashes are no sequence; or it
            has no ``kv_transfer_params``, not even None.
    """
    request_id = getattr(request, "request_id", None)
    if not isinstance(request_id, str):
        raise no_request(call, request)
    if request_id == NO_REQUEST:
        raise EngineProtocolError("a request has an empty id: give each its own", request_id=NO_REQUEST)
    name, rule = "", ""
    try:  # without a call for each field: engines bring requests in every busy step
        name, rule = "num_tokens", "give a whole number"
        _ = request.num_tokens.__index__
        name = "num_prompt_tokens"
        _ = request.num_prompt_tokens.__index__
        name, rule = "block_hashes", "give a sequence of bytes"
        len(request.block_hashes[:0])
        name, rule = "kv_transfer_params", "give the parameters of its user, or None"
        _ = request.kv_transfer_params
    except (AttributeError, TypeError, LookupError) as error:
        what = f": {name} is {getattr(request, name)!r:.80}" if hasattr(request, name) else f" has no {name}"
        raise refused(request_id, f"{what}: {rule}") from error


def check_computed(request: Request, num_computed_tokens: int) -> None:
    """Check the number of tokens that an engine has in its own cache.

    Raises:
        EngineProtocolError: it is no whole number, or negative.
    """
    if not hasattr(num_computed_tokens, "__index__"):  # a fraction would end calls to come, also that of its end
        why = f": {num_computed_tokens!r:.80} tokens are reported as computed: give a whole number"
        raise refused(request.request_id, why)
    if num_computed_tokens < 0:
        raise refused(request.request_id, f": {num_computed_tokens} tokens are reported as computed: give 0 or more")


def check_allocation(record: RequestRecord, geometry: Geometry, blocks: BlockTables, num_external_tokens: int) -> None:
    """Check that an engine takes what it was offered.

    Raises:
        EngineProtocolError: a load still runs, a number of tokens that is no whole one, below 0 or above what was
            offered, a part of them where a group has a window, or tables of another number of groups.
    """
    name = record.ctx.request_id
    if record.state is RequestState.LOADING:
        raise refused(name, " was allocated again before its load had ended")
    offered = record.lookup.hit_tokens if record.state is RequestState.OFFERED else 0
    if not hasattr(num_external_tokens, "__index__"):
        raise refused(name, f": {num_external_tokens!r:.80} external tokens: give a whole number")
    if num_external_tokens < 0:
        raise refused(name, f": {num_external_tokens} external tokens: give 0 or more")
    if num_external_tokens > offered:
        raise refused(name, f": {num_external_tokens} external tokens, but {offered} were offered")
    if not num_external_tokens:
        return
    if geometry.has_windows and num_external_tokens < offered:
        raise refused(
            name,
            f": {num_external_tokens} of {offered} offered tokens were taken, but a part would need a window that was "
            "not gathered: take all of them or none",
        )
    if not hasattr(blocks, "__len__"):
        raise refused(name, f": block tables are {blocks!r:.80}: give one table per group")
    if len(blocks) != len(geometry.groups):
        raise refused(name, f": block tables of {len(blocks)} groups, the engine has {len(geometry.groups)}")
