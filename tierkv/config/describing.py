"""Allowed values of configuration keys in words, for error messages and the reference page."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from tierkv.config.units import SIZE_ALLOWED, format_size, parse_size

_COUNT_MAX = 2**31 - 1
"""Bound of whole numbers that have no practical limit. Messages do not name it."""


def allowed_values(name: str, field: FieldInfo) -> str:
    """Text of the values that a field allows, such as ``"a whole number from 1 to 256"``."""
    return _in_words(name, field.annotation, field.metadata)


def model_of(annotation: object) -> type[BaseModel] | None:
    """Model inside a field's annotation: that of a section, or of the elements of a list; None for plain values."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def model_at(root: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    """Model of the table at a location; None where there is no table."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        model = model_of(model.model_fields[part].annotation)
    return model


def _in_words(name: str, annotation: object, metadata: Iterable[Any]) -> str:
    marks = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for mark in more:
            marks += mark.metadata if isinstance(mark, FieldInfo) else [mark]
    if get_origin(annotation) in {Union, types.UnionType}:
        (inner,) = (part for part in get_args(annotation) if part is not types.NoneType)
        return _in_words(name, inner, marks)
    if any(isinstance(mark, BeforeValidator) and mark.func is parse_size for mark in marks):
        return _size_in_words(marks)
    if get_origin(annotation) is Literal:
        return " or ".join(_quoted(choice) for choice in get_args(annotation))
    if (model := model_of(annotation)) is not None:
        is_list = get_origin(annotation) is tuple
        table = f"a list of tables; in TOML write each as `[[{name}]]`" if is_list else f"a table; in TOML `[{name}]`"
        return str(getattr(model, "ALLOWED", table))  # a model with a shorter form states it in ALLOWED
    return _plain_in_words(name, annotation, marks)


def _size_in_words(marks: Iterable[Any]) -> str:
    low = next((mark.ge for mark in marks if hasattr(mark, "ge")), None)
    return SIZE_ALLOWED if low is None else f"a size of at least {format_size(low)}: {SIZE_ALLOWED}"


def _plain_in_words(name: str, annotation: object, marks: Iterable[Any]) -> str:
    if get_origin(annotation) is Mapping:
        return f"a table of names; each: {_in_words(name, get_args(annotation)[1], ())}"
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return f"text in quotes{', not empty' if any(getattr(mark, 'min_length', 0) for mark in marks) else ''}"
    noun = "a whole number" if annotation is int else "a number"
    return f"{noun}{' of seconds' if name.endswith('_s') else ''}{_range(marks)}"


def _range(marks: Iterable[Any]) -> str:
    bounds = {name: getattr(mark, name) for mark in marks for name in ("gt", "ge", "le") if hasattr(mark, name)}
    low, high = bounds.get("ge"), bounds.get("le")
    if high == _COUNT_MAX:
        high = None
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    words = []
    if low is not None:
        words.append(f"at least {low:g}")
    if "gt" in bounds:
        words.append(f"above {bounds['gt']:g}")
    if high is not None:
        words.append(f"at most {high:g}")
    return f", {' and '.join(words)}" if words else ""


def _quoted(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice)
