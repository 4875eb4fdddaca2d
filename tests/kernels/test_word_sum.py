"""word_sum: known answers, the twin and the native code alike, and what it detects."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_kernels.cpu.library import library
from baton_kernels.word_sum import MASK, checksum_of, host_checksum, key_of, word_sum

quick = settings(deadline=None, database=None, max_examples=60)
needs_native = pytest.mark.skipif(library() is None, reason="no native CPU kernels here")
seeds = st.integers(0, MASK)


def bytes_of(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def checksum(data: bytes | bytearray, seed: int = 0) -> int:
    return host_checksum(bytes_of(data), seed)


def plain_checksum(data: bytes, seed: int) -> int:
    """The formula, word by word, in integers of any size."""

    def spread(x: int) -> int:
        x = ((x ^ x >> 32) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 29) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 32

    step = 0x9E3779B97F4A7C15
    key = spread(spread((seed + step) % 2**64))
    total = 0
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
        place = (key + at // 8 * step) % 2**64
        total += spread(word ^ place) * (place | 1)
    return spread(spread((total + len(data) * step) % 2**64))


@pytest.mark.parametrize(
    ("data", "seed", "wanted"),
    [
        (b"", 0, 0),
        (b"\0", 0, 0x5786_1A01_D9D4_18EB),
        (b"baton", 1, 0x7305_7EEB_6B46_3078),
        (bytes(range(256)), 0xFFFF_FFFF_FFFF_FFFF, 0x9DB8_ADC9_7064_D0E6),
    ],
)
def test_known_answers(data: bytes, seed: int, wanted: int) -> None:
    assert checksum(data, seed) == wanted


@quick
@given(st.binary(max_size=700), seeds)
def test_it_is_the_formula(data: bytes, seed: int) -> None:
    assert checksum(data, seed) == plain_checksum(data, seed)


@needs_native
@quick
@given(st.integers(0, 300), st.integers(0, 1 << 40), seeds)
def test_native_code_gives_what_the_twin_gives(count: int, first_word: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
    key = key_of(seed)
    assert word_sum(words, key, first_word) == word_sum.twin(words, key, first_word)
    some = words[::2]
    assert word_sum(some, key, first_word) == word_sum.twin(some, key, first_word)


@quick
@given(st.integers(0, 200), st.integers(0, 200), seeds)
def test_parts_add_up_whatever_their_order(count: int, cut: int, seed: int) -> None:
    cut = min(cut, count)
    words = torch.randint(-(1 << 62), 1 << 62, (count,), generator=torch.Generator().manual_seed(1))
    key = key_of(seed)
    parts = word_sum(words[cut:], key, cut) + word_sum(words[:cut], key)
    assert parts == word_sum(words, key)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 31, 64, 200])
def test_every_flipped_bit_shows(num_bytes: int) -> None:
    data = bytearray(random.Random(num_bytes).randbytes(num_bytes))
    before = checksum(data, 5)
    for bit in range(8 * num_bytes):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data, 5) != before
        data[bit // 8] ^= 1 << bit % 8


@quick
@given(st.binary(min_size=16, max_size=256), st.data())
def test_words_that_trade_places_show(data: bytes, draw: st.DataObject) -> None:
    words = [data[at : at + 8] for at in range(0, len(data) // 8 * 8, 8)]
    i, j = (draw.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    if words[i] == words[j]:
        return
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    assert checksum(b"".join(swapped)) != checksum(b"".join(words))


@quick
@given(st.binary(max_size=64), st.integers(1, 20))
def test_zeros_at_the_end_count(data: bytes, count: int) -> None:
    assert checksum(data + bytes(count)) != checksum(data)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("flips", [(63,), (63, 31), (62, 30), (31,), (0,), (0, 63)])
def test_the_same_bits_flipped_in_two_words_do_not_cancel(flips: tuple[int, ...]) -> None:
    """What a line that is stuck would do. Were differences not spread, one in two of these would
    pass."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator)
    key = key_of(3)
    before = word_sum(words, key)
    flip = sum(1 << bit for bit in flips)
    flip -= (flip >> 63) << 64
    for _ in range(2000):
        damaged = words.clone()
        damaged[rng.sample(range(64), 2)] ^= flip
        assert word_sum(damaged, key) != before


@pytest.mark.slow
def test_checksums_of_random_data_are_spread_evenly() -> None:
    """Each of the 64 bits is set in half of them; 5 sigma of 4096 draws is 160."""
    sums = [checksum(number.to_bytes(16, "little")) for number in range(4096)]
    assert len(set(sums)) == len(sums)
    for bit in range(64):
        assert abs(sum(value >> bit & 1 for value in sums) - 2048) < 160


def test_a_total_may_be_signed() -> None:
    assert checksum_of(-1, 8) == checksum_of(MASK, 8)
