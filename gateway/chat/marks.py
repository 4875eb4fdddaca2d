"""Marks in streamed output, possibly split between pieces. Pure."""

from __future__ import annotations


def num_held_back(text: str, marks: tuple[str, ...]) -> int:
    """Number of characters at the end of `text` that may begin a mark."""
    longest = max(map(len, marks)) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-num:]) for mark in marks):
            return num
    return 0
