"""A payload and its checksum in one pass: bit for bit what the twins give in two."""

from __future__ import annotations

import pytest
import torch

from baton_kernels import kv_pack as twins
from baton_kernels.gpu import kv_pack as kernels
from baton_kernels.kv_pack import Runs
from baton_kernels.word_sum import checksum_of, host_checksum, key_of

BLOCK_IDS = [7, 3, 11, 0, 19]
NUM_BLOCKS = 20
SEED = 0xFEDC_BA98_7654_3210


def pool_of(block_size: int, row_words: int) -> torch.Tensor:
    shape = (NUM_BLOCKS, 3, 2, 2, block_size, row_words)
    generator = torch.Generator().manual_seed(block_size)
    return torch.randint(-(1 << 62), 1 << 62, shape, generator=generator)


@pytest.mark.parametrize(
    ("block_size", "first_token", "num_tokens", "row_words", "run_tokens"),
    [
        *((16, 0, 80, 2, run_tokens) for run_tokens in (5, 16)),
        *((5, 7, 9, 3, run_tokens) for run_tokens in (1, 3, 5, 100)),
        (3, 2, 1, 1, 1),
        *((16, 15, 65, 5, run_tokens) for run_tokens in (3, 100)),
    ],
)
def test_one_pass_is_two(
    block_size: int, first_token: int, num_tokens: int, row_words: int, run_tokens: int
) -> None:
    pool = pool_of(block_size, row_words)
    runs = Runs(first_token, num_tokens, 1, 2, run_tokens)
    key = key_of(SEED)
    got, wanted = (torch.zeros(8 * num_tokens * row_words, dtype=torch.int64) for _ in range(2))
    total = kernels.kv_pack_summed(pool, BLOCK_IDS, runs, got, key)
    assert total == twins.kv_pack_summed.twin(pool, BLOCK_IDS, runs, wanted, key)
    assert torch.equal(got, wanted)
    num_bytes = got.numel() * 8
    assert checksum_of(int(total), num_bytes) == host_checksum(got.view(torch.uint8), SEED)

    empty, other = torch.zeros_like(pool), torch.zeros_like(pool)
    assert kernels.kv_unpack_summed(empty, BLOCK_IDS, runs, got, key) == total
    assert twins.kv_unpack_summed.twin(other, BLOCK_IDS, runs, got, key) == total
    assert torch.equal(empty, other)
    for token in range(first_token, first_token + num_tokens):
        at = (BLOCK_IDS[token // block_size], slice(1, 3), slice(None), slice(None))
        inside = (*at, token % block_size)
        assert torch.equal(empty[inside], pool[inside])


def test_a_changed_word_gives_another_sum() -> None:
    pool, key = pool_of(4, 2), key_of(SEED)
    runs = Runs(1, 9, 0, 3, 4)
    payload = torch.zeros(9 * 3 * 2 * 2 * 2, dtype=torch.int64)
    total = kernels.kv_pack_summed(pool, BLOCK_IDS, runs, payload, key)
    payload[41] ^= 1 << 40
    assert kernels.kv_unpack_summed(torch.zeros_like(pool), BLOCK_IDS, runs, payload, key) != total


def test_rows_that_are_no_words_are_refused() -> None:
    pool = pool_of(4, 2).view(torch.int32)
    with pytest.raises(ValueError, match="int32"):
        kernels.kv_pack_summed(pool, BLOCK_IDS, Runs(0, 1, 0, 1, 4), pool[0], 1)
