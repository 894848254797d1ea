"""Pictures of the tiers and of the way of a chunk: ``python -m nox -s generate`` writes them to docs/pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from drawing import FOLDER, MARGIN, WIDTH, arrow, box, document, text

_BOX, _GAP = 62, 46
"""Height of a tier's box, and of the room between two."""
_STEP, _LINE = 36, 19
"""Height of a step without its lines, and of one line."""


@dataclass(frozen=True, slots=True)
class Level:
    """One tier in the picture of the tiers."""

    name: str
    what: str
    width: float
    move: str
    """Form of the bytes on their way to the tier below."""


LEVELS = (
    Level("GPU blocks", "the engine computes and reads here", 280, "copies, checked"),
    Level("host tier", "pinned CPU memory", 310, "frames with checksums"),
    Level("disk, LMDB", "local: outlives the process", 345, "frames, a codec per tier"),
    Level("S3, GCS, Azure, Valkey, ...", "shared: one store for many engines", 380, ""),
)


def tiers() -> str:
    """Tiers from the fastest to the largest, with both directions between them."""
    parts, y = [], float(MARGIN)
    for index, level in enumerate(LEVELS):
        middle = WIDTH / 2
        parts.append(box(middle - level.width / 2, y, level.width, _BOX, index))
        parts.append(text(middle, y + 26, level.name, "strong plain", "middle"))
        parts.append(text(middle, y + 48, level.what, "dim small plain", "middle"))
        y += _BOX
        if level.move:
            parts.append(arrow(105, y + 5, 105, y + _GAP - 5))
            parts.append(text(95, y + 28, "store", "small", "end"))
            parts.append(text(middle, y + 28, level.move, "dim small", "middle"))
            parts.append(arrow(WIDTH - 105, y + _GAP - 5, WIDTH - 105, y + 5))
            parts.append(text(WIDTH - 95, y + 28, "load", "small"))
            y += _GAP
    description = "; ".join(f"{level.name}: {level.what}" for level in LEVELS)
    return document("The tiers of a stack", description, "".join(parts), y + MARGIN)


@dataclass(frozen=True, slots=True)
class Step:
    """One step on the way of a chunk."""

    actor: str
    lines: tuple[str, ...]
    colour: int
    otherwise: str = ""
    """Result of a failure."""


_ENGINE, _CORE, _COPY, _TIER = range(4)

STORE = (
    Step("engine", ("computes the blocks of a chunk on the GPU",), _ENGINE),
    Step("scheduler", ("offers chunks that are complete", "and not stored yet"), _CORE),
    Step(
        "manager", ("takes a free slot of the host tier,", "or evicts a chunk"), _CORE, "no slot: not stored, counted"
    ),
    Step(
        "worker",
        ("gathers the pages into the slot, adds header", "and checksum: the slot is sealed"),
        _COPY,
        "failed copy: dropped, counted",
    ),
    Step(
        "manager",
        ("makes the chunk readable, and queues it", "for each tier by its write policy"),
        _CORE,
        "full queue: not written, counted",
    ),
    Step("tier", ("encodes the payload with its codec,", "on an I/O thread"), _TIER),
    Step(
        "backend",
        ("stores the frame; its index names", "what is safe"),
        _TIER,
        "error: tried again, then dropped",
    ),
)
LOAD = (
    Step("scheduler", ("makes the keys of a prompt's chunks", "from its hashes"), _CORE),
    Step(
        "manager",
        ("finds them: in host memory and local indexes", "at once, in shared tiers by a probe"),
        _CORE,
        "late answer: a miss",
    ),
    Step("scheduler", ("answers the part that loads faster", "than the model computes it"), _CORE),
    Step("manager", ("reserves slots, in order of arrival",), _CORE, "no slot in time: the ready part is loaded"),
    Step(
        "tier",
        ("reads the frames, decodes them, verifies", "key, namespace, length and checksum"),
        _TIER,
        "damaged: a miss, counted, not read again",
    ),
    Step(
        "worker",
        ("verifies the slot again, and scatters", "the pages into the GPU's blocks"),
        _COPY,
        "failed copy: the engine computes it",
    ),
    Step("engine", ("computes only the rest of the prompt",), _ENGINE),
)


def way(title: str, steps: Sequence[Step]) -> str:
    """Steps one below the other, numbered, with what a failure becomes."""
    parts, y = [text(MARGIN, MARGIN + 15, title, "title plain")], float(MARGIN + 34)
    for index, step in enumerate(steps):
        height = _STEP + _LINE * (len(step.lines) + bool(step.otherwise)) - 6
        if index + 1 < len(steps):
            parts.append(arrow(27, y + 32, 27, y + height + 6))
        parts.append(f'<circle cx="27" cy="{y + 16:g}" r="13" class="f{step.colour}"/>')
        parts.append(text(27, y + 21, str(index + 1), "number", "middle"))
        parts.append(text(54, y + 21, step.actor, f"strong plain t{step.colour}"))
        at = y + 21
        for line in step.lines:
            at += _LINE
            parts.append(text(54, at, line, "small plain"))
        if step.otherwise:
            parts.append(text(54, at + _LINE, step.otherwise, "dim small plain"))
        y += height + 8
    description = " ".join(f"{i}. {step.actor}: {' '.join(step.lines)}." for i, step in enumerate(steps, start=1))
    return document(title, description, "".join(parts), y + MARGIN - 8)


PICTURES: dict[str, Callable[[], str]] = {
    f"{FOLDER}/tiers.svg": tiers,
    f"{FOLDER}/store.svg": partial(way, "A chunk is stored", STORE),
    f"{FOLDER}/load.svg": partial(way, "A chunk is loaded", LOAD),
}
"""Pictures by file, from docs/reference on."""
