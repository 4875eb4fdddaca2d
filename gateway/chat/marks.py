"""Marks in a model's output, that may be cut anywhere. Pure."""

from __future__ import annotations


def num_held_back(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-num:]) for mark in marks):
            return num
    return 0
