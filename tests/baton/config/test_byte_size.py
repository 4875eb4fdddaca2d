"""Byte counts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.fields import parse_byte_size

UNITS = ["", "B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB", "k", "m", "g", "K", "M", "G"]


@given(st.integers(0, 2**60))
def test_a_plain_number_is_itself(size: int) -> None:
    assert parse_byte_size(str(size)) == size
    assert parse_byte_size(size) == size


@given(number=st.integers(0, 10_000), unit=st.sampled_from(UNITS), space=st.sampled_from(["", " "]))
def test_a_unit_is_a_factor(number: int, unit: str, space: str) -> None:
    assert parse_byte_size(f"{number}{space}{unit}") == number * int(
        str(parse_byte_size(f"1{unit}"))
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5G", 3 * 2**29),
        ("25.6k", 25_600),
        ("1K", 1024),
        ("0.1GB", 10**8),
    ],
)
def test_known_sizes(text: str, size: int) -> None:
    assert parse_byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 GB 2", "1gib", "1XB", "٣GB", "0x10"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give a number of bytes"):
        parse_byte_size(text)
