"""The model's part of the measurements on real KV, on a small Gemma 3 with random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402 - after the skips

from benchmarks.models.kv_pages import PageLayout, PromptKv, groups_of  # noqa: E402
from benchmarks.models.lossy_effect import divergence, equal_front, restore  # noqa: E402
from benchmarks.models.real_model import RealModel, Tokenizer  # noqa: E402
from benchmarks.texts import texts  # noqa: E402

WINDOW = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of each kind, weights so large that KV matters; a tokenizer that knows every word of the texts."""
    from tokenizers import Tokenizer as Words  # noqa: PLC0415 - comes with transformers
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from tokenizers.pre_tokenizers import Whitespace  # noqa: PLC0415

    place = tmp_path_factory.mktemp("gemma")
    words = sorted({word for text in texts().values() for word, _ in Whitespace().pre_tokenize_str(text)})
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3} | {word: 4 + i for i, word in enumerate(words)}
    inner = Words(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(place)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.2,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> RealModel:
    """It, in memory."""
    return RealModel(folder)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[int]:
    """A text, several windows long."""
    return Tokenizer(folder).tokens(texts()["Python code"], 200)


def test_a_text_begins_with_its_first_token(folder: Path, tokens: list[int]) -> None:
    """Without it Gemma writes nonsense, and its KV would be that of nonsense."""
    assert tokens[0] == 2
    assert 2 not in tokens[1:]
    with pytest.raises(ValueError, match="tokens: 100000 are needed"):
        Tokenizer(folder).tokens(texts()["Python code"], 100_000)


def test_after_exact_kv_the_model_says_the_same(model: RealModel, tokens: list[int]) -> None:
    """If cut and rest did not fit, as with a window that sees too much, every codec would look harmful."""
    kv = model.prefill(tokens[:150])
    at_once, after = model.logits(tokens, 50), model.logits(tokens[150:], 50, kv)
    assert divergence(at_once, after) < 1e-3
    assert model.greedy(tokens[150:], 5, kv) == model.greedy(tokens, 5)


def test_a_chunk_gives_back_what_was_cut(model: RealModel, tokens: list[int]) -> None:
    """A lossless codec must leave nothing to measure, in any layer of any kind."""
    from benchmarks.models.codecs import subjects  # noqa: PLC0415 - opens plugins

    kv = model.prefill(tokens[:150])
    groups, layout = groups_of(model.layer_kinds), PageLayout(16, 2)
    assert {kind: sum(map(len, of_kind)) for kind, of_kind in groups.items()} == dict.fromkeys(groups, 2)
    for subject in subjects():
        back = restore(subject, kv, groups, layout)
        assert back.num_tokens == 128
        equal = np.array_equal(back.keys, kv.keys[:, :128]) and np.array_equal(back.values, kv.values[:, :128])
        assert equal != subject.plugin.lossy, subject.name


def test_wrong_kv_is_seen(model: RealModel, tokens: list[int]) -> None:
    """The negative control: a measure that wrong KV does not move says nothing of rounded KV."""
    kv = model.prefill(tokens[:150])
    exact = model.logits(tokens[150:], 50, kv)
    for wrong in (PromptKv(kv.keys[::-1].copy(), kv.values), PromptKv(kv.keys, np.zeros_like(kv.values))):
        assert divergence(exact, model.logits(tokens[150:], 50, wrong)) > 0.05


def test_writing_is_compared_up_to_the_first_difference() -> None:
    """Tokens behind it belong to another text."""
    assert equal_front([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert equal_front([1, 2], [1, 2]) == 2


def test_the_benchmark_runs(root: Path, folder: Path) -> None:
    """Every row, of every codec and kind of text, beside its limit."""
    command = [sys.executable, "-m", "benchmarks", "model_kv", "--quick", "--json", "--model", str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "TIERKV_VALIDATE"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for kind in texts():
        sizes = {row["what"].split(",")[0]: row for row in rows if row["what"].endswith(f", size, {kind}")}
        assert {"none", "zstd", "bf16", "fp8", "int8", "aes-256-gcm"} <= sizes.keys()
        for row in sizes.values():
            assert {"full attention, times smaller", "sliding window, times smaller"} <= row["extra"].keys()
        assert 1.3 < sizes["bf16"]["measured"] < 1.6
        assert sum(row["what"].endswith(f"next token, {kind}") for row in rows) == 2
    assert all(row["limit"] > 0 and row["measured"] >= 0 for row in rows)
