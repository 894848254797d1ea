"""The decoder is a Llama, and what it computes depends on the tokens alone."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierkv.reference.configs import EngineConfig, ModelConfig
from tierkv.reference.kv_pool import kv_tensors
from tierkv.reference.model import NORM_EPS, ROPE_BASE, Decoder, TokenRange

BLOCK = 8
DTYPES = ["float32", "bfloat16"]

Windows = tuple[int | None, ...]
WINDOWS: list[Windows] = [(), (5, None), (None, BLOCK), (2 * BLOCK + 1, BLOCK + 2), (1, 1)]
"""Of layers: inside a block, one block, and over blocks; beside full attention and alone."""


def small(dtype: str, windows: Windows = ()) -> ModelConfig:
    """Two query heads to a key head, and sizes that are no powers of two."""
    return ModelConfig(
        layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=48, vocab=256, dtype=dtype, windows=windows
    )


def words(count: int, vocab: int, seed: int = 0) -> list[int]:
    """A prompt; the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


class Sequences:
    """A decoder and a pool full of NaN, in which several sequences live."""

    def __init__(
        self, config: ModelConfig, *, block_tokens: int = BLOCK, num_groups: int = 1, tensor_parallel: int = 1
    ) -> None:
        sizes = {"block_tokens": block_tokens, "num_groups": num_groups, "tensor_parallel": tensor_parallel}
        self.decoder = Decoder(config, **sizes)
        self.pools = [kv_tensors(EngineConfig(model=config, num_blocks=24, **sizes)) for _ in range(tensor_parallel)]
        self.cache = self.pools[0]
        for pool in self.pools:
            for tensor in pool:
                tensor.fill_(float("nan"))

    def forward(self, *batch: TokenRange) -> list[Tensor]:
        return self.decoder.forward(batch, self.pools)

    def run(self, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> Tensor:
        return self.forward(TokenRange(start, tokens[start:], [table]))[0]

    def kv(self, table: Sequence[int], length: int) -> Tensor:
        """[layers, 2, length, kv_heads, head_dim] of the sequence in these blocks."""
        pages = torch.stack([tensor[list(table)] for tensor in self.cache])
        return pages.transpose(1, 2).flatten(2, 3)[:, :, :length]

    def greedy(self, prompt: Sequence[int], table: Sequence[int], count: int, start: int = 0) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.run(tokens, table, start).argmax()))
            start = len(tokens) - 1
        return tokens[len(prompt) :]


def dense_logits(decoder: Decoder, config: ModelConfig, tokens: Sequence[int]) -> Tensor:
    """The same model as a page of textbook: no pages, no tiles, no cache, one head at a time, double precision."""
    rows = config.heads * config.head_dim
    kv_rows = config.kv_heads * config.head_dim
    positions = torch.arange(len(tokens), dtype=torch.float64)
    half = config.head_dim // 2

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + NORM_EPS) * scale.double()

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous())
        angles = positions[:, None] * ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    x = decoder._embedding[list(tokens)].double()
    for number, layer in enumerate(decoder._layers):
        window = config.windows[number % len(config.windows)] if config.windows else None
        seen = torch.tensor(
            [[j <= i and (window is None or i - j < window) for j in range(len(tokens))] for i in range(len(tokens))]
        )
        h = norm(x, layer.attention_norm)
        q, k, v = (h @ w.double().T for w in layer.attention[0].qkv.split_with_sizes([rows, kv_rows, kv_rows]))
        heads = []
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            mine = slice(head * config.head_dim, (head + 1) * config.head_dim)
            theirs = slice(shared * config.head_dim, (shared + 1) * config.head_dim)
            scores = turned(q[:, mine]) @ turned(k[:, theirs]).T / config.head_dim**0.5
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, theirs])
        x = x + torch.cat(heads, -1) @ layer.attention[0].output.double().T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down.double().T
    return norm(x[-1], decoder._final_norm) @ decoder._head.double().T


@pytest.mark.parametrize("windows", WINDOWS)
def test_it_is_a_llama(windows: Windows) -> None:
    """Rotary embedding, grouped queries, causality, windows, norms and gate must be those of the family exactly."""
    config = small("float32", windows)
    sequences = Sequences(config, num_groups=2)
    tokens = words(3 * BLOCK + 5, config.vocab)
    tables = [[3, 9, 1, 4], [5, 2, 8, 7]]
    torch.testing.assert_close(
        sequences.forward(TokenRange(0, tokens, tables))[0].double(),
        dense_logits(sequences.decoder, config, tokens),
        rtol=1e-4,
        atol=1e-4,
    )


def test_ranks_share_the_heads() -> None:
    """Each rank writes its own key and value heads into its own pool; together they are the same model."""
    config = small("float32", (None, 5))
    tokens, tables = words(3 * BLOCK + 5, config.vocab), [[3, 9, 1, 4], [5, 2, 8, 7]]
    one, two = Sequences(config, num_groups=2), Sequences(config, num_groups=2, tensor_parallel=2)
    (logits,), (summed,) = one.forward(TokenRange(0, tokens, tables)), two.forward(TokenRange(0, tokens, tables))
    torch.testing.assert_close(summed, logits, rtol=1e-4, atol=1e-4)
    joined = torch.cat([pool[0] for pool in two.pools], dim=-2)
    assert [pool[0].shape[-2] for pool in two.pools] == [1, 1]
    torch.testing.assert_close(joined, one.cache[0], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("windows", WINDOWS[1:])
@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, 3 * BLOCK + 2)))
def test_windows_do_not_depend_on_how_a_prompt_is_cut(dtype: str, windows: Windows, cuts: set[int]) -> None:
    """A block that the window has passed is free: here its pages are NaN, and no bit of what comes after may change."""
    config = small(dtype, windows)
    tokens = words(3 * BLOCK + 3, config.vocab)
    tables = [[1, 2, 3, 4], [5, 6, 7, 8]]
    whole, pieces = Sequences(config, num_groups=2), Sequences(config, num_groups=2)
    logits = whole.forward(TokenRange(0, tokens, tables))[0]
    ends = [*sorted(cuts), len(tokens)]
    last = torch.empty(0)
    for start, end in zip([0, *ends], ends, strict=False):
        last = pieces.forward(TokenRange(start, tokens[start:end], tables))[0]
        for i in range(4):
            for group, window in enumerate(windows):
                mine, theirs = pieces.cache[0][tables[group][i]], whole.cache[0][tables[group][i]]
                rows = slice(0, max(0, end - i * BLOCK))
                if mine.isfinite().any():
                    assert torch.equal(mine[:, rows], theirs[:, rows])
                if window is not None and end - window + 1 >= (i + 1) * BLOCK:
                    mine.fill_(float("nan"))
    assert torch.equal(last, logits)


def test_bfloat16_is_the_same_model_rounded() -> None:
    """A bfloat16 run that is far from the exact one would hide errors behind its rounding."""
    config = small("bfloat16")
    sequences = Sequences(config)
    tokens = words(2 * BLOCK + 1, config.vocab)
    exact = dense_logits(sequences.decoder, config, tokens)
    distance = (sequences.run(tokens, [1, 2, 3]).double() - exact).norm() / exact.norm()
    assert 0 < distance < 0.1
    assert all(tensor.dtype is torch.bfloat16 for tensor in sequences.cache)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(cuts=st.sets(st.integers(1, 3 * BLOCK + 2)), table=st.permutations(range(1, 9)), other=st.booleans())
def test_bytes_do_not_depend_on_how_a_prompt_is_cut(
    dtype: str, cuts: set[int], table: list[int], *, other: bool
) -> None:
    """The promise of the module: chunked prefill, decoding, block ids and neighbours leave no trace in KV or logits."""
    config = small(dtype)
    tokens = words(3 * BLOCK + 3, config.vocab)
    whole = Sequences(config)
    logits = whole.run(tokens, [1, 2, 3, 4])
    pieces = Sequences(config)
    ends = [*sorted(cuts), len(tokens)]
    last = torch.empty(0)
    for start, end in zip([0, *ends], ends, strict=False):
        batch = [TokenRange(start, tokens[start:end], [table])]
        if other:
            batch.insert(0, TokenRange(0, words(end, config.vocab, seed=end), [list(range(9, 24))]))
        last = pieces.forward(*batch)[-1]
    assert torch.equal(last, logits)
    assert torch.equal(pieces.kv(table, len(tokens)), whole.kv([1, 2, 3, 4], len(tokens)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_do_not_depend_on_the_cut_at_the_default_size(dtype: str) -> None:
    """Other sizes take other kernels; the demo runs this one."""
    config = ModelConfig(dtype=dtype)
    tokens = words(150, config.vocab)
    table = list(range(1, 12))
    whole = Sequences(config, block_tokens=16)
    logits = whole.run(tokens, table)
    rng = random.Random(3)
    for _ in range(4):
        pieces = Sequences(config, block_tokens=16)
        ends = [*sorted(rng.sample(range(1, 150), 9)), 150]
        for start, end in zip([0, *ends], ends, strict=False):
            last = pieces.run(tokens[:end], table, start)
            if end == 150:
                assert torch.equal(last, logits)
        assert torch.equal(pieces.kv(table, 150), whole.kv(table, 150))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_computed_again_writes_the_same_bytes(dtype: str) -> None:
    """After a load of the whole prompt its last token is recomputed, in a block that others may be sharing."""
    config = small(dtype)
    tokens = words(2 * BLOCK, config.vocab)
    sequences = Sequences(config)
    logits = sequences.run(tokens, [1, 2])
    before = sequences.kv([1, 2], len(tokens)).clone()
    assert torch.equal(sequences.run(tokens, [1, 2], start=len(tokens) - 1), logits)
    assert torch.equal(sequences.kv([1, 2], len(tokens)), before)


def test_only_the_asked_rows_are_written() -> None:
    """A tile is computed whole; its padding must not reach the pool, where a neighbour in time may rely on it."""
    sequences = Sequences(small("bfloat16"))
    sequences.run(words(BLOCK + 3, 256), [1, 2])
    for tensor in sequences.cache:
        assert tensor[1].isfinite().all()
        assert tensor[2, :, :3].isfinite().all()
        assert tensor[2, :, 3:].isnan().all()
        assert tensor[0].isnan().all()
        assert tensor[3:].isnan().all()


def test_groups_use_their_own_tables() -> None:
    """Groups share the pool's tensors: each must read and write the blocks of its own table, and no other."""
    tokens = words(2 * BLOCK, 256)
    one = Sequences(small("bfloat16"))
    logits = one.run(tokens, [1, 2])
    two = Sequences(small("bfloat16"), num_groups=2)
    assert torch.equal(two.forward(TokenRange(0, tokens, [[5, 6], [7, 8]]))[0], logits)
    (pool,) = two.cache
    assert torch.equal(pool[[5, 6]], one.cache[0][[1, 2]])
    assert torch.equal(pool[[7, 8]], one.cache[1][[1, 2]])
    assert pool[[0, 1, 2, 3, 4, *range(9, 24)]].isnan().all()


def test_seeds_make_different_models() -> None:
    """The seed is in the namespace: if it did not change the weights, the demo could not show two models apart."""
    first, again, other = (Sequences(ModelConfig(seed=seed)).run([1, 2, 3], [1]).sum().item() for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_lively(dtype: str) -> None:
    """Equality of tokens proves something only if the model says different things at different places."""
    config = ModelConfig(dtype=dtype)
    for seed in range(3):
        sequences = Sequences(config, block_tokens=16)
        prompt = words(60 + seed, config.vocab, seed)
        assert sequences.run(prompt, range(1, 12)).isfinite().all()
        tokens = sequences.greedy(prompt, range(1, 12), 48)
        assert len(set(tokens)) >= 30
        assert tokens != Sequences(config, block_tokens=16).greedy([*prompt[:-1], 7], range(1, 12), 48)


def damaged_runs(trials: int, width: int) -> Iterator[bool]:
    """Whether the tokens changed, for ``width`` bytes of the cached prompt inverted at a place drawn by lot."""
    config, rng = ModelConfig(), random.Random(11)
    table = list(range(1, 10))
    sequences = Sequences(config, block_tokens=16)
    for seed in range(trials):
        prompt = words(96, config.vocab, seed)
        honest = sequences.greedy(prompt, table, 32)
        page = rng.choice(sequences.cache)[rng.randint(1, 5)].view(-1).view(torch.uint8)
        at = 2 * rng.randrange((len(page) - width) // 2) + 1  # little endian: sign and exponent
        page[at : at + width] ^= 0xFF
        yield sequences.greedy(prompt, table, 32, start=95) != honest


@pytest.mark.parametrize(("width", "at_least"), [(1, 6), (64, 10)])
def test_wrong_bytes_change_the_tokens(width: int, at_least: int) -> None:
    """If damage did not show, the demo's comparison of tokens would pass over a corrupt cache."""
    changed = list(damaged_runs(12, width))
    assert sum(changed) >= at_least, changed


SCRIPT = """
import hashlib, torch
torch.set_num_threads(1)
from tierkv.reference import Engine, EngineConfig, ModelConfig
engine = Engine(EngineConfig(model=ModelConfig(layers=2)))
engine.generate([list(range(1, 60))], 8)
digest = hashlib.blake2b()
for tensor in engine.kv_caches()[0]:
    digest.update(tensor.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_a_new_process_computes_the_same_bytes() -> None:
    """KV outlives the process: what one stored, the next must be able to continue as if it were its own."""
    other = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    lines: list[str] = []
    exec(SCRIPT, {"print": lines.append, "__name__": "here", "hashlib": hashlib})
    assert lines == [other.stdout.strip()]
