"""Codecs on the KV of a real model (``--model FOLDER``) that reads several kinds of text.

How small, per kind of text, with what each kind of layer takes of it; how fast, beside memcpy; by size of chunk; and
for codecs that are lossy, what they change in what the model says (:mod:`benchmarks.models.lossy_effect`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.measure import Settings, cpu_ratios, cpu_s_per_gb, medians, take_turns, timed
from benchmarks.models.codecs import Subject, error_over_values, subjects
from benchmarks.models.kv_pages import Array, PageLayout, PromptKv, groups_of
from benchmarks.models.lossy_effect import EffectSizes, effects
from benchmarks.models.pressing import Press
from benchmarks.models.real_model import RealModel, Tokenizer
from benchmarks.rows import Row
from benchmarks.texts import texts

LAYOUT = PageLayout(block_tokens=32, blocks_per_chunk=8)
OTHER_LAYOUTS = (PageLayout(16, 1), PageLayout(32, 1), PageLayout(16, 8), PageLayout(16, 16), PageLayout(32, 32))
_SHOWN = {"full_attention": "full attention", "sliding_attention": "sliding window"}

Groups = Mapping[str, Sequence[Sequence[int]]]


def run(settings: Settings) -> Iterator[Row]:
    """Yield sizes by text, speeds, sizes by chunk, and effects."""
    if settings.model is None:
        sys.stderr.write("model_kv: no model was given (--model FOLDER), so nothing is measured\n")
        return
    sizes = settings.pick(EffectSizes(1024, 128, 32), EffectSizes(256, 16, 2))
    model, tokenizer = RealModel(settings.model), Tokenizer(settings.model)
    groups = groups_of(model.layer_kinds)
    tokens = {name: tokenizer.tokens(text, sizes.beginning + sizes.rest) for name, text in texts().items()}
    kv: dict[str, PromptKv] = {}
    for name, prompt in tokens.items():
        _say(f"reading {name}")
        kv[name] = model.prefill(prompt[: sizes.beginning])
    for subject in subjects():
        _say(f"codec {subject.name}")
        for name, of_text in kv.items():
            yield _size(subject, name, _by_kind([of_text], groups, LAYOUT))
        if subject.name != "none":
            yield from _speeds(subject, _flat(_by_kind(list(kv.values()), groups, LAYOUT)), settings)
        for layout in OTHER_LAYOUTS:
            if layout.chunk_tokens <= sizes.beginning and subject.name in {"bf16", "fp8", "int8", "zstd"}:
                what = f"chunks of {layout.blocks_per_chunk} blocks of {layout.block_tokens} tokens"
                yield _size(subject, what, _by_kind(list(kv.values()), groups, layout))
    lossy = [subject for subject in subjects() if subject.plugin.lossy]
    for name, prompt in tokens.items():
        _say(f"what rounding changes: {name}")
        yield from effects(model, lossy, name, prompt, kv[name], groups, LAYOUT, sizes)


def _say(what: str) -> None:
    sys.stderr.write(f"model_kv: {what}\n")
    sys.stderr.flush()


def _by_kind(kvs: Sequence[PromptKv], groups: Groups, layout: PageLayout) -> dict[str, list[Array]]:
    """Map each kind of layer to the payloads of all its chunks."""
    return {
        kind: [chunk for kv in kvs for layers in of_kind for chunk in layout.cut(kv, layers)]
        for kind, of_kind in groups.items()
    }


def _flat(by_kind: Mapping[str, list[Array]]) -> list[Array]:
    return [payload for payloads in by_kind.values() for payload in payloads]


def _size(subject: Subject, what: str, by_kind: Mapping[str, list[Array]]) -> Row:
    press = Press(subject.codec)
    extra, raw_bytes, stored = {}, 0, 0
    restored: list[Array] = []
    for kind, payloads in by_kind.items():
        of_kind = [press.restored(payload) for payload in payloads]
        restored += [back for _, back in of_kind]
        sizes = sum(payload.nbytes for payload in payloads), sum(size for size, _ in of_kind)
        extra[f"{_SHOWN.get(kind, kind)}, times smaller"] = sizes[0] / sizes[1]
        raw_bytes, stored = raw_bytes + sizes[0], stored + sizes[1]
    values, back = np.concatenate(_flat(by_kind)), np.concatenate(restored)
    if subject.plugin.lossy:
        extra["error over values, root of mean squares"] = error_over_values(values.data.cast("B"), back.data.cast("B"))
    elif not np.array_equal(values, back):
        raise RuntimeError(f"codec {subject.name} gave back other bytes")
    # Of each payload by itself: that is how codecs get them.
    bounds = [(*subject.bound(payload), payload.nbytes) for payload in _flat(by_kind)]
    bound = raw_bytes / sum(length / times for _, times, length in bounds)
    return Row(f"{subject.name}, size, {what}", "times smaller", raw_bytes / stored, bounds[0][0], bound, extra=extra)


def _speeds(subject: Subject, payloads: Sequence[Array], settings: Settings) -> Iterator[Row]:
    """Process all payloads in turn, as a thread of a tier does; the limit is copying each of them once."""
    press, target = Press(subject.codec), np.empty(max(map(len, payloads)), np.uint16)
    stored = [kept for kept in map(press.stored, payloads) if kept is not None]

    def copy() -> None:
        for payload in payloads:
            np.copyto(target[: len(payload)], payload)

    def encode() -> None:
        for payload in payloads:
            press.encode(payload)

    def decode() -> None:
        for kept in stored:
            press.decode(kept)

    total = sum(payload.nbytes for payload in payloads)
    works: Sequence[tuple[str, Callable[[], None]]] = (("encode", encode), ("decode", decode))
    for what, work in works:
        turns = take_turns([partial(timed, work), partial(timed, copy)], settings.rounds)
        costs = [cpu_s_per_gb(medians(turn), total) for turn in turns]
        speeds = [1 / max(1e-9, cost) for cost in costs]
        ratios = [1 / ratio for ratio in cpu_ratios(*turns)]
        extra = {"cpu s/GB": costs[0], "cpu s/GB of the limit": costs[1]}
        yield Row(f"{subject.name}, {what}", "GB/s", speeds[0], "memcpy of the payload", speeds[1], ratios, None, extra)
