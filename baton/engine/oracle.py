"""The oracle engine: an engine without a model, in which any lost, doubled, moved or corrupted KV changes the output.

The KV of a token is a hash of the prefix that ends with it, spread over layers, keys, values, heads and dimensions.
The next token is a hash of all KV of the sequence as it stands in the blocks, read through the block table. So the
right output is known in advance (`oracle_tokens`), and no other output can come from wrong blocks but by a collision
of 64-bit hashes. Not for secrets: the hashes only have to mix well.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.engine.array_kv_pool import ArrayKvPool
from baton.engine.interface import Batch, EngineSpec, LayersDone, SampleRow, SequenceSlice
from baton.errors import EngineFault
from baton.types import FinishReason, KvLayout, Sample, Sampling, TokenLogprobs, finish_reason

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15
_Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class OracleOptions:
    """layer_group_size: layers per layers_done call. step_s: what a forward takes, in seconds of real time.

    poison_token_id: a token whose computation fails, to test that a fault stays with its request; -1 for none.
    """

    num_blocks: int
    block_size: int = 16
    vocab_size: int = 1000
    max_model_len: int = 4096
    num_layers: int = 4
    layer_group_size: int = 2
    step_s: float = 0.0
    poison_token_id: int = -1
    model: str = "oracle"


class OracleEngine:
    """Implements baton.engine.interface.Engine."""

    def __init__(self, options: OracleOptions) -> None:
        layout = KvLayout("oracle", options.num_layers, 1, 2, "int64", options.block_size)
        self._options = options
        self._kv = ArrayKvPool(layout, options.num_blocks)
        self._weights = _slot_weights(layout)
        self.spec = EngineSpec(
            model=options.model,
            layout=layout,
            num_blocks=options.num_blocks,
            vocab_size=options.vocab_size,
            max_model_len=min(options.max_model_len, options.num_blocks * options.block_size),
        )

    @property
    def kv(self) -> ArrayKvPool:
        return self._kv

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        """See Engine.forward. Raises EngineFault if the batch holds the poison token."""
        if any(self._options.poison_token_id in part.token_ids for part in batch.slices):
            raise EngineFault(f"token {self._options.poison_token_id} is poison")
        if self._options.step_s:
            time.sleep(self._options.step_s)
        for part in batch.slices:
            self._write(part)
        if layers_done:
            step = self._options.layer_group_size
            for first in range(0, self._options.num_layers, step):
                layers_done(first, min(step, self._options.num_layers - first))
        return tuple(tuple(self._sample(part, row) for row in part.rows) for part in batch.slices)

    def _write(self, part: SequenceSlice) -> None:
        size = self._options.block_size
        data = self._kv.data.view(np.uint64)
        state = _ROOT
        if part.start:
            position = part.start - 1
            block_id = part.block_table[position // size]
            slot = int(data[block_id, 0, 0, 0, position % size, 0])
            state = slot ^ int(self._weights[0, 0, 0, 0])
        for position, token_id in enumerate(part.token_ids, start=part.start):
            state = _mix(state ^ (token_id + 1) * 0xD6E8FEB86659FD93)
            block_id = part.block_table[position // size]
            data[block_id, :, :, :, position % size] = np.uint64(state) ^ self._weights

    def _sample(self, part: SequenceSlice, row: SampleRow) -> Sample:
        digest = self._digest(part.block_table, part.start + row.offset + 1)
        return choose(digest, row, self._options.vocab_size)

    def _digest(self, block_table: Sequence[int], num_tokens: int) -> int:
        """A hash of the KV of tokens [0, num_tokens), read from the blocks."""
        size = self._options.block_size
        num_blocks = -(-num_tokens // size)
        slots = self._kv.data.view(np.uint64)[list(block_table[:num_blocks])]
        by_token = np.moveaxis(slots, 4, 1).reshape(num_blocks * size, -1)[:num_tokens]
        return _digest_of(by_token)


def oracle_tokens(
    prompt: Sequence[int], sampling: Sampling, vocab_size: int, choice: int = 0
) -> list[int]:
    """The output that a whole, undisturbed request gets from any oracle engine of default shape."""
    engine = OracleEngine(OracleOptions(num_blocks=1, block_size=4096, vocab_size=vocab_size))
    token_ids = list(prompt)
    start = 0
    while True:
        row = SampleRow(len(token_ids) - start - 1, sampling, token_ids, len(prompt), choice)
        part = SequenceSlice(token_ids[start:], start, [0], (row,))
        start = len(token_ids)
        token_ids.append(engine.forward(Batch((part,)))[0][0].token_id)
        num_output = len(token_ids) - len(prompt)
        end = finish_reason(token_ids[-1], num_output, len(token_ids), sampling, 4096)
        if end is not FinishReason.NONE:
            return token_ids[len(prompt) :]


def choose(digest: int, row: SampleRow, vocab_size: int) -> Sample:
    """The token that follows a prefix of this digest: a hash of it, of the sampling and of what penalties look at."""
    sampling = row.sampling
    state = digest
    if not sampling.is_greedy:
        state = _mix(state ^ sampling.seed)
        state = _mix(state ^ (row.num_output_tokens << 32) ^ row.choice)
    state = _mix(state ^ _sampling_digest(sampling))
    if sampling.has_penalties:
        for token_id in row.token_ids[row.num_prompt_tokens :]:
            state = _mix(state ^ token_id)
    token_id = state % vocab_size
    while token_id in sampling.stop_token_ids and row.num_output_tokens < sampling.min_tokens:
        state = _mix(state + 1)
        token_id = state % vocab_size
    if sampling.logprobs < 0:
        return Sample(token_id)
    logprob = -float(state >> 40) / (1 << 20)
    top = tuple(((token_id + i) % vocab_size, logprob - i) for i in range(sampling.logprobs))
    return Sample(token_id, TokenLogprobs(token_id, logprob, top))


def _sampling_digest(sampling: Sampling) -> int:
    numbers = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        float(sampling.top_k),
        *(value for entry in sorted(sampling.logit_bias.items()) for value in entry),
    )
    state = 0
    for number in numbers:
        # Single precision, as on the wire.
        state = _mix(state ^ int.from_bytes(struct.pack("<f", number), "little"))
    return state


def _slot_weights(layout: KvLayout) -> _Words:
    """One word per (layer, key or value, head, dimension), so that swapped slots are told apart."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    words = [_mix(_ROOT + index) for index in range(int(np.prod(shape)))]
    return np.array(words, dtype=np.uint64).reshape(shape)


def _digest_of(by_token: _Words) -> int:
    """A hash of slots [tokens, words] that depends on each word and its place."""
    places = np.arange(1, by_token.size + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (by_token.reshape(-1) ^ places) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(29)
    return _mix(int(np.sum(mixed * (places | np.uint64(1)), dtype=np.uint64)))


def _mix(word: int) -> int:
    """A bijection of 64-bit words that mixes well (the finaliser of SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
