"""Byte counts as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

_FACTORS: Mapping[str, int] = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
    | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
    | {letter: 1024**power for power, letter in enumerate("KMGT", start=1)}
    | {letter: 1000**power for power, letter in enumerate("kmgt", start=1)}
)
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_byte_size(value: object) -> object:
    """The number of bytes that text like "512MiB", "2GB", "1.5G" or "4096" names; other types come
    back as they are.

    MiB and M are 1024-based, MB and m are 1000-based, likewise for the other letters. Raises
    ValueError.
    """
    if not isinstance(value, str):
        return value
    match = _PATTERN.fullmatch(value)
    if match is None or match[2] not in _FACTORS:
        raise ValueError("give a number of bytes, like 536870912, 512MiB or 2GB")
    return int(Decimal(match[1]) * _FACTORS[match[2]])
