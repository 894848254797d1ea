"""Generator of docs/reference/configuration.md from the models. A test compares the committed page."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tierkv.config.describing import allowed_values, model_of
from tierkv.config.schema import StackConfig
from tierkv.config.tier_schema import CodecConfig, TierConfig
from tierkv.config.units import SIZE_ALLOWED, format_size, parse_size

_HEAD = f"""\
# Configuration of a stack

<!-- Made from tierkv/config/schema.py and tier_schema.py by `nox -s generate`; change that, not this page. -->

One file describes a stack: TOML (`.toml`), YAML (`.yaml`, `.yml`) or JSON (`.json`) with the same keys. An unknown key,
name or unit, a value out of its range, and a number in quotes are errors. All of them are listed at once, before
anything starts. `tierkv check FILE` also inspects the storage that the file names.

**Sizes** are {SIZE_ALLOWED}. `GiB` is 2\\*\\*30 bytes, `GB` is 10\\*\\*9.

**Durations** are plain numbers of seconds; their keys end in `_s`.

**Relative paths** start at the working directory of the process.
"""


def render_reference() -> str:
    """Render the whole page as Markdown."""
    parts = [_HEAD, *_section("Top level", StackConfig)]
    for name, field in StackConfig.model_fields.items():
        model = model_of(field.annotation)
        if model is not None:
            parts += _section(f"`[[{name}]]`" if model is TierConfig else f"`[{name}]`", model)
    parts.append(
        "Every other key of a tier's table is an option of its backend. Every other key of a `codec` table is an "
        "option "
        "of that codec. `tierkv plugins --json` lists them. Options that are whole numbers of bytes "
        "(`..._bytes`, "
        "`..._bytes_max`) accept sizes.\n"
    )
    return "\n".join(parts)


def _section(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}\n\n{(model.__doc__ or '').strip()}\n"
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        if not (model is TierConfig and name == "options"):
            yield f"| `{name}` | {_value(name, field)} | {_default(name, field)} | {_meaning(field)} |"
    yield ""


def _value(name: str, field: FieldInfo) -> str:
    allowed = allowed_values(name, field)
    if allowed.startswith("a size of"):
        allowed = allowed.removesuffix(f": {SIZE_ALLOWED}")
    return allowed.replace(SIZE_ALLOWED, "a size").replace("|", "\\|")


def _default(name: str, field: FieldInfo) -> str:
    if field.default_factory is not None or field.default == ():
        return "empty"
    if field.default is PydanticUndefined:
        return "the backend's name" if name == "name" else "**required**"
    if field.default is None:
        return "none"
    if any(getattr(mark, "func", None) is parse_size for mark in field.metadata):
        return f'`"{format_size(field.default)}"`'
    return f"`{_literal(field.default)}`"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    value = value.name if isinstance(value, CodecConfig) else value
    return f'"{value}"' if isinstance(value, str) else str(value)


def _meaning(field: FieldInfo) -> str:
    model = model_of(field.annotation)
    text = field.description or (model.__doc__ or "").strip().partition("\n")[0] if model else field.description
    return (text or "").replace("|", "\\|")
