"""Several prompts at once: each row behind its own prefix, or one number of columns for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import GREEDY, computed_in_pieces, contents, greedy, make_prompt, padded

from tierkv.integrations.transformers.layers import cache_option

KINDS = ["llama", "gemma3", "mistral", "gpt2"]


def loaded(cache: Any) -> list[int]:
    """Tokens per row that the last call got from tiers."""
    return [report.loaded_tokens for report in cache.last_prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_lengths_each_use_their_own_prefix(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """The rows of a batch are independent: a row without a stored prefix must not reduce the others' hits."""
    served, document = model(kind), make_prompt(100)
    prompts = [document + make_prompt(40, seed=1), document + make_prompt(3, seed=2), make_prompt(60, seed=3)]
    ids, mask = padded(prompts)
    expected = greedy(served, ids, mask)
    cache = open_cache(served)
    cache.prefill(document)
    assert torch.equal(cache.generate(ids, mask, **GREEDY), expected)
    assert loaded(cache) == [96, 96, 0]
    assert torch.equal(cache.generate(ids, mask, **GREEDY), expected)
    assert loaded(cache) == [128, 96, 48]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_each_row_finds_the_answer(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """The next prompt of a conversation begins with this one and its answer.

    Rows are padded by different amounts, and the prompt is outside the window."""
    served = model(kind)
    prompts = [make_prompt(57, seed=1), make_prompt(90, seed=2)]
    ids, mask = padded(prompts)
    cache = open_cache(served)
    answered = cache.generate(ids, mask, **{**GREEDY, "max_new_tokens": 60})
    turns = [
        [*row[pad:].tolist(), *make_prompt(9, seed=3)]
        for row, pad in zip(answered, (mask == 0).sum(1).tolist(), strict=True)
    ]
    next_ids, next_mask = padded(turns)
    assert torch.equal(cache.generate(next_ids, next_mask, **GREEDY), greedy(served, next_ids, next_mask))
    assert loaded(cache) == [(57 + 59) // 16 * 16, (90 + 59) // 16 * 16]


def test_prompts_may_be_lists_and_unpadded(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """A tokenizer may return lists; the cache pads them."""
    served = model("llama")
    prompts = [make_prompt(30, seed=1), make_prompt(50, seed=2)]
    expected = greedy(served, *padded(prompts))
    cache = open_cache(served)
    for given in (prompts, [torch.tensor(prompt) for prompt in prompts]):
        assert torch.equal(cache.generate(given, **GREEDY), expected)
    assert torch.equal(cache.generate(prompts[0], **GREEDY), greedy(served, torch.tensor(prompts[:1])))
    assert torch.equal(cache.generate(torch.tensor(prompts[0]), **GREEDY), greedy(served, torch.tensor(prompts[:1])))


def test_without_a_mask_the_padding_token_is_padding(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """As in `generate` itself. Otherwise padding would be taken for text, and found again as such."""
    served = model("llama")
    ids, mask = padded([make_prompt(30, seed=1), make_prompt(50, seed=2)])
    cache = open_cache(served)
    assert torch.equal(cache.generate(ids, **GREEDY), greedy(served, ids, mask))
    assert [report.prompt_tokens for report in cache.last_prompts] == [30, 50]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(("beams", "sequences"), [(3, 1), (3, 2), (1, 2)])
def test_beams_and_several_sequences(
    kind: str, beams: int, sequences: int, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """`generate` widens a batch for them, and the restored prefix must be widened with it."""
    served = model(kind)
    ids, mask = padded([make_prompt(70, seed=1), make_prompt(44, seed=2)])
    more = {"num_beams": beams, "num_return_sequences": sequences, "max_new_tokens": 12}
    if beams == 1:
        more |= {"do_sample": True}  # several greedy sequences are refused: they would be equal
    torch.manual_seed(0)
    expected = greedy(served, ids, mask, **more)
    cache = open_cache(served)
    for rows in ([0, 0], [64, 32]):
        torch.manual_seed(0)
        out = cache.generate(ids, mask, **{**GREEDY, **more})
        assert torch.equal(out, expected)
        assert loaded(cache) == rows


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_load_gives_the_columns_that_every_row_has(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A cache object has one length: what one row has beyond the others is cut, and padding counts as there."""
    served, document = model(kind), make_prompt(100)
    ids, mask = padded([document + make_prompt(50, seed=1), document + make_prompt(9, seed=2)])
    cache = open_cache(served)
    cache.prefill(document)
    hit = cache.load(ids, mask)
    assert hit.tokens == 96
    assert hit.past_key_values.get_seq_length() == 96
    assert loaded(cache) == [96, 96 - 41]
    out = served.generate(ids, attention_mask=mask, **hit.arguments, **GREEDY)
    assert torch.equal(out, greedy(served, ids, mask))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_row_that_begins_behind_what_was_loaded(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A short prompt beside a long one is all padding there: it has nothing yet, and its padding goes on."""
    served, document = model(kind), make_prompt(40)
    ids, mask = padded([document + make_prompt(60, seed=1), make_prompt(20, seed=2)])
    cache = open_cache(served)
    cache.prefill(document)
    hit = cache.load(ids, mask)
    assert hit.tokens == 32
    out = served.generate(ids, attention_mask=mask, **hit.arguments, **GREEDY)
    assert torch.equal(out, greedy(served, ids, mask))
    whole_mask = torch.cat([mask, torch.ones_like(out[:, 100:])], dim=1)
    cache.store(out, hit.past_key_values, whole_mask)
    assert torch.equal(cache.generate(out, whole_mask, **GREEDY), greedy(served, out, whole_mask))
    assert loaded(cache) == [112, 32]


@pytest.mark.parametrize("apart", [0, 16, 7])
def test_load_of_a_batch_with_windows(apart: int, model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Windows end with chunks: rows that differ by whole chunks have a common column, others have none. What is
    given is right in any case."""
    served, document = model("gemma3"), make_prompt(96)
    ids, mask = padded([document + make_prompt(20 + apart, seed=1), document + make_prompt(20, seed=2)])
    cache = open_cache(served)
    cache.prefill([document + make_prompt(1, seed=3)])
    hit = cache.load(ids, mask)
    assert hit.tokens == {0: 96, 16: 96, 7: 0}[apart]
    out = served.generate(ids, attention_mask=mask, **hit.arguments, **GREEDY)
    assert torch.equal(out, greedy(served, ids, mask))
    assert torch.equal(cache.generate(ids, mask, **GREEDY), out)
    assert loaded(cache) == [96, 96]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_batch_that_the_user_runs_can_be_stored(
    kind: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """`load`, one's own `generate`, `store`: nothing is lost beside the convenient way."""
    served = model(kind)
    ids, mask = padded([make_prompt(57, seed=1), make_prompt(90, seed=2)])
    cache = open_cache(served)
    hit = cache.load(ids, mask)
    assert hit.tokens == 0
    out = served.generate(ids, attention_mask=mask, **hit.arguments, **GREEDY)
    whole_mask = torch.cat([mask, torch.ones_like(out[:, 90:])], dim=1)
    reports = cache.store(out, hit.past_key_values, whole_mask)
    assert [report.offered_tokens for report in reports] == [80, 112]
    assert torch.equal(cache.generate(out, whole_mask, **GREEDY), greedy(served, out, whole_mask))
    assert loaded(cache) == [80, 112]


def test_what_pads_a_short_answer_is_not_stored(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """In a batch, a short answer is padded to the longest; the padding is no prefix of any prompt."""
    served = model("llama")
    prompts = [make_prompt(40, seed=1), make_prompt(40, seed=2)]
    plain = greedy(served, torch.tensor(prompts))
    ends = int(plain[0, 43])  # the first row ends with its fourth token
    assert ends not in plain[1, 40:]
    cache = open_cache(served)
    out = cache.generate(prompts, eos_token_id=ends, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 60})
    assert out.sequences[0, 44:].eq(0).all()
    assert out.sequences.shape == (2, 100)
    assert [report.offered_tokens for report in cache.last_prompts] == [32, 96]


def test_a_cache_that_beam_search_has_mixed_up(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Its rows no longer belong to the sequences that come back; storing them would be wrong bytes under right keys."""
    served = model("llama")
    ids, mask = padded([make_prompt(40, seed=1)])
    cache = open_cache(served)
    past = cache.load(ids).past_key_values
    served.generate(ids, attention_mask=mask, **cache_option(served, past), **{**GREEDY, "num_beams": 2})
    with pytest.raises(ValueError, match="beam search"):
        cache.store(torch.cat([ids, ids]), past)


def test_a_widened_cache_can_be_stored(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Several samples of one prompt: each row goes its own way from the same prefix."""
    served = model("llama")
    ids = torch.tensor([make_prompt(64, seed=1)])
    cache = open_cache(served)
    past = cache.prefill(ids).past_key_values
    past.batch_repeat_interleave(2)
    wide = torch.cat([ids.repeat(2, 1), torch.tensor([[5], [6]])], dim=1)
    out = served.generate(wide, attention_mask=torch.ones_like(wide), **cache_option(served, past), **GREEDY)
    assert [report.offered_tokens for report in cache.store(out, past)] == [16, 16]
    assert torch.equal(cache.generate(out, **GREEDY), greedy(served, out))
    assert loaded(cache) == [80, 80]


def test_prefill_of_a_batch_fills_every_row(model: Callable[..., Any], open_cache: Callable[..., Any]) -> None:
    """Several documents in one call; and its result is a batch cache like any other."""
    served = model("gemma3")
    documents = [make_prompt(64, seed=1), make_prompt(100, seed=2)]
    cache = open_cache(served)
    prefix = cache.prefill(documents)
    assert prefix.tokens == 100
    plain = [computed_in_pieces(served, tokens, [*range(64, len(tokens), 64), len(tokens)]) for tokens in documents]
    for row, one in enumerate(plain):
        for ours, theirs in zip(contents(prefix.past_key_values), contents(one), strict=True):
            shared = min(ours.shape[2], theirs.shape[2])
            assert torch.equal(ours[row, :, -shared:], theirs[0, :, -shared:])
    for document in documents:
        assert cache.load([*document, 5]).tokens == len(document) // 16 * 16


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        (torch.tensor([[5, 6, 0]]), torch.tensor([[1, 1, 0]]), "padded at the left"),
        (torch.tensor([[5, 6, 7]]), torch.tensor([[1, 0, 1]]), "holes"),
        (torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 0]]), "no token"),
        (torch.tensor([[5, 6, 7]]), torch.tensor([[1, 1]]), "attention_mask is"),
        (torch.tensor([[0.5]]), None, "give ids"),
        (torch.zeros((1, 2, 3), dtype=torch.long), None, "give ids"),
        ([[5, 6], [7]], torch.tensor([[1, 1]]), "padded here"),
        ([[]], None, "no token"),
        (torch.zeros((0, 5), dtype=torch.long), None, "give ids"),
        (torch.tensor([[True, False]]), None, "give ids"),
        ([[5, 6], [1.5, 2.5]], None, "prompt 1 has other values than ids"),
        ([torch.tensor([[5, 6]])], None, "tensors of one dimension"),
        (None, None, "input_ids = None: give lists of ids, or a tensor"),
        ([None], None, "prompt 0 has other values than ids"),
        ([[5, 6], None], None, "prompt 1 has other values than ids"),
        ([1.5, 2.5], None, "prompt 0 has other values than ids"),
        ([5, 10**6], None, "id 1000000: the model knows ids from 0 to"),
        ([5, -1], None, "id -1: the model knows ids from 0 to"),
    ],
)
def test_prompts_that_make_no_sense_are_refused_by_name(
    ids: Any, mask: torch.Tensor | None, says: str, model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """A right-padded batch above all: it would be served, and wrong."""
    with pytest.raises(ValueError, match=says):
        open_cache(model("llama")).generate(ids, mask, **GREEDY)


def test_padding_is_refused_where_it_shifts_positions(
    model: Callable[..., Any], open_cache: Callable[..., Any]
) -> None:
    """BART numbers the columns of a batch: behind a prefix that was computed without padding, its tokens would be
    wrong, and without an error. Rows of one length are served, and a prompt of any length can be forgotten."""
    served, document = model("bart"), make_prompt(50)
    cache = open_cache(served)
    ids, mask = padded([document, make_prompt(20, seed=1)])
    with torch.no_grad():
        plain = served(input_ids=ids, attention_mask=mask, use_cache=True)
    for call in (
        lambda: cache.generate(ids, mask, **GREEDY),
        lambda: cache.prefill([document, [5, 6]]),
        lambda: cache.load(ids, mask),
        lambda: cache.store(ids, plain.past_key_values, mask),
    ):
        with pytest.raises(ValueError, match="BartForCausalLM counts padding in its positions"):
            call()
    rows = torch.tensor([document, make_prompt(50, seed=1)])
    for tokens in (0, 48):
        assert torch.equal(cache.generate(rows, **GREEDY), greedy(served, rows))
        assert loaded(cache) == [tokens, tokens]
    assert cache.forget([document, [5, 6]])
