"""Inputs of a parser: the files of its corpus first, then drawn ones, most of them valid inputs with changes.

A corpus is a folder beside the test: inputs that once broke the parser, and the shape of hostile ones. A parser may
return a value or raise its own error. Every other exception fails the test, and so does a call that wants much memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

CASES_SHARE = 3
"""Drawn inputs of a parser for each example of another property test: 300, and 6,000 in the session nightly."""
SPARE_BYTES = 256 << 20
"""Memory that a parser may take beyond what the process has. No input of these tests is longer than some kilobytes."""
CHANGES_MAX = 4

Document = Any
"""Value of JSON."""

_TEXTS = st.text(st.characters(), max_size=12)  # lone halves of surrogates, too: JSON can express them
_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([0, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, -(2**63)]),
    st.floats(),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
DOCUMENTS = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3), max_leaves=8
)


def parser_test(
    corpus: Path, inputs: st.SearchStrategy[bytes], share: int = CASES_SHARE
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that takes one input as ``data``: bytes.

    Args:
        corpus: folder of the inputs that are played first.
        inputs: draws the others.
        share: drawn inputs for each example of another property test.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def limited(*arguments: Any, **named: Any) -> None:
            with limited_memory():
                test(*arguments, **named)

        cases = share * hypothesis.settings().max_examples
        played = hypothesis.settings(max_examples=cases, suppress_health_check=list(hypothesis.HealthCheck))(
            hypothesis.given(data=inputs)(limited)
        )
        for path in sorted(corpus.iterdir()):
            played = hypothesis.example(data=path.read_bytes())(played)
        return played

    return decorate


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let an allocation fail that takes the process beyond what it has now, and :data:`SPARE_BYTES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def changed_bytes(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Draw a valid input with a few changes of bytes, or other bytes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, CHANGES_MAX))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from((0, 1, 2, 4, 8, 64))))
        other = draw(st.sampled_from(valid))
        data[start:end] = draw(
            st.one_of(
                st.binary(min_size=end - start, max_size=end - start),
                st.binary(max_size=16),
                st.sampled_from((b"", b"\xff" * (end - start), bytes(end - start), bytes(data[:start]), other[start:])),
            )
        )
    return bytes(data)


def any_bytes(valid: Sequence[bytes], longest: int = 300) -> st.SearchStrategy[bytes]:
    """Draw changed valid inputs, and sometimes arbitrary bytes."""
    return changed_bytes(valid) | changed_bytes(valid) | st.binary(max_size=longest)


@st.composite
def changed_documents(draw: st.DrawFn, valid: Sequence[Document]) -> Document:
    """Draw a document of JSON with a few of its values replaced, removed or added."""
    document = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, CHANGES_MAX))):
        places = list(_places(document))
        if not places:
            return draw(DOCUMENTS)
        holder, place = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("replace", "replace", "remove", "add", "double")))
        if how == "replace":
            holder[place] = draw(DOCUMENTS)
        elif how == "remove":
            del holder[place]
        elif isinstance(holder, list):
            holder.insert(place, draw(DOCUMENTS) if how == "add" else copy.deepcopy(holder[place]))
        else:
            holder[draw(_TEXTS)] = draw(DOCUMENTS)
    return document


def any_json(valid: Sequence[Document]) -> st.SearchStrategy[bytes]:
    """Draw changed documents as bytes, and their bytes with changes."""
    documents = changed_documents(valid).map(written)
    return documents | documents | any_bytes([written(document) for document in valid])


def written(document: Document) -> bytes:
    """Document as bytes, with NaN and infinities as Python writes and reads them."""
    return json.dumps(document).encode()


def _places(document: Document) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a document with each of its indices or keys."""
    if isinstance(document, list):
        pairs: list[tuple[Any, Any]] = list(enumerate(document))
    elif isinstance(document, dict):
        pairs = list(document.items())
    else:
        return
    for place, value in pairs:
        yield document, place
        yield from _places(value)
