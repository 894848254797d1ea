"""Prompts of a trace in tokens: their lengths, and the length of a chunk."""

from __future__ import annotations

import numpy as np

from tierkv.errors import ConfigError
from tierkv.replay.stack_distances import Ints
from tierkv.replay.trace import Trace

_BLOCK_TOKENS = 16


def prompt_tokens(trace: Trace, chunk_tokens: int) -> Ints:
    """Tokens of each prompt: its ``input_length``, otherwise those of its chunks."""
    given = np.array(trace.input_tokens, np.int64)
    return np.where(given >= 0, given, _chunks(trace) * chunk_tokens)


def infer_chunk_tokens(trace: Trace) -> int:
    """Tokens per chunk that fit all prompts with a length: with whole chunks only, or with a last one covered in part.

    Of several possible numbers, a power of two is preferred, then a multiple of 16.

    Raises:
        ConfigError: no prompt has a length, or no number fits.
    """
    tokens, chunks = np.array(trace.input_tokens, np.int64), _chunks(trace)
    known = (tokens > 0) & (chunks > 0)
    if not known.any():
        raise ConfigError("no prompt of the trace has an input_length and chunks: add --chunk-tokens, such as 512")
    tokens, chunks = tokens[known], chunks[known]
    several = chunks > 1
    covered = int(np.ceil(tokens / chunks).max()), int(_below(tokens[several], chunks[several] - 1))
    whole = int((tokens // (chunks + 1)).max()) + 1, int((tokens // chunks).min())
    for low, high in (covered, whole):
        if low <= high:
            return _roundest(low, high)
    raise ConfigError(
        "input_length and hash_ids of the trace do not fit one length of chunks: add --chunk-tokens, such as 512"
    )


def _chunks(trace: Trace) -> Ints:
    starts = np.array(trace.starts, np.int64)
    return starts[1:] - starts[:-1]


def _below(tokens: Ints, chunks: Ints) -> float:
    """Largest number of tokens with which no prompt would fit into one chunk less."""
    return float((-(-tokens // chunks) - 1).min()) if len(tokens) else float(2**31)


def _roundest(low: int, high: int) -> int:
    power = 1 << (low - 1).bit_length()
    if power <= high:
        return power
    multiple = -(-low // _BLOCK_TOKENS) * _BLOCK_TOKENS
    return multiple if multiple <= high else low
