"""Samples of the oracle engine: a token and log probabilities, hashed from the prefix's digest.

A token depends on the digest, the sampling options, and the tokens that penalties read. Log
probabilities depend on the digest only, as they are the model's.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from baton.errors import EngineFault
from baton.sampling_params import OPTIONS
from baton.types import Sample, Sampling, TokenLogprobs
from engine.interface import SampleRow
from engine.sampling.beam_search import num_candidates
from engine.sampling.restrictions import allowed_mask, banned_tokens, forbidden_by

_MASK = (1 << 64) - 1
#: Logits are in [0, _SPREAD).
_SPREAD = 6.0

#: Options that change the drawn token; ints last.
_DRAW_NUMBERS = sorted(
    (name for name, option in OPTIONS.items() if option.changes_draw),
    key=lambda name: isinstance(getattr(Sampling(), name), int),
)


def mix(word: int) -> int:
    """A well-mixing bijection of 64-bit words (the finaliser of SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def choose(digest: int, row: SampleRow, vocab_size: int) -> Sample:
    """The sample after a prefix with this digest. Raises EngineFault if no token is allowed."""
    sampling = row.sampling
    if row.scored_token_id is not None:
        values, scored = _logprobs(digest, vocab_size), row.scored_token_id
        rank = int((values >= values[scored]).sum())
        top = _best(values, sampling.prompt_logprobs)
        return Sample(scored, TokenLogprobs(scored, float(values[scored]), top, rank))
    allowed = _allowed_ids(row, vocab_size)
    if allowed is not None and not len(allowed):
        raise EngineFault("no token is left to choose")
    if sampling.beam is not None:
        return _candidates(digest, row, vocab_size, allowed)
    state = _state(digest, row)
    token_id = state % vocab_size if allowed is None else int(allowed[state % len(allowed)])
    if sampling.logprobs < 0:
        return Sample(token_id)
    values = _logprobs(digest, vocab_size)
    if ids := sampling.logprob_token_ids:
        top = tuple((ids[i], value) for i, value in _best(values[list(ids)], len(ids)))
    else:
        top = _best(values, sampling.logprobs)
    return Sample(token_id, TokenLogprobs(token_id, float(values[token_id]), top))


def _state(digest: int, row: SampleRow) -> int:
    sampling = row.sampling
    state = digest
    if not sampling.is_greedy:
        state = mix(state ^ sampling.seed)
        state = mix(state ^ (row.num_output_tokens << 32) ^ row.choice)
    state = mix(state ^ _sampling_digest(sampling))
    if sampling.has_penalties:
        for token_id in row.token_ids[row.num_prompt_tokens :]:
            state = mix(state ^ token_id)
    return state


def _allowed_ids(row: SampleRow, vocab_size: int) -> NDArray[np.intp] | None:
    """Allowed tokens, ascending; None for all."""
    banned, mask = banned_tokens(row), allowed_mask(row)
    if mask is None and not banned:
        return None
    forbidden = (
        np.zeros(vocab_size, dtype=np.bool_)
        if mask is None
        else forbidden_by([mask], vocab_size)[0]
    )
    forbidden[[token_id for token_id in banned if token_id < vocab_size]] = True
    return np.flatnonzero(~forbidden)


def _logprobs(digest: int, vocab_size: int) -> NDArray[np.float32]:
    """Log probabilities of all tokens, [vocab] float32, as from a model and on the wire."""
    words = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(digest)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    logits = (words >> np.uint64(40)).astype(np.float64) * (_SPREAD / (1 << 24))
    logprobs: NDArray[np.float32] = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    return logprobs


def _best(values: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """(token id, value) of the `count` largest, descending; ties by id."""
    order = np.argsort(-values, kind="stable")[:count]
    return tuple(zip(order.tolist(), values[order].tolist(), strict=True))


def _candidates(
    digest: int, row: SampleRow, vocab_size: int, allowed: NDArray[np.intp] | None
) -> Sample:
    """The sample of a beam: see SampleRow."""
    values = _logprobs(digest, vocab_size)
    ids = np.arange(vocab_size) if allowed is None else allowed
    best = _best(values[ids], num_candidates(row.sampling))
    top = tuple((int(ids[place]), value) for place, value in best)
    return Sample(top[0][0], TokenLogprobs(*top[0], top))


def _sampling_digest(sampling: Sampling) -> int:
    numbers = (
        *(float(getattr(sampling, name)) for name in _DRAW_NUMBERS),
        *(value for entry in sorted(sampling.logit_bias.items()) for value in entry),
    )
    # float32, as on the wire.
    return _digest_of(struct.pack(f"<{len(numbers)}f", *numbers))


@lru_cache(maxsize=256)
def _digest_of(words: bytes) -> int:
    """Digest of 32-bit words; cached because few samplings are in use at a time."""
    state = 0
    for (word,) in struct.iter_unpack("<I", words):
        state = mix(state ^ word)
    return state
