"""Wrap the prose of our documents at 120 columns, or with --check say which are not. Paragraphs
that fit stay as they are."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120

_FENCE = re.compile(r" *(```|~~~)")
_BEGIN, _END = "<!-- begin:", "<!-- end"
#: Lines that stand alone: headings, tables, comments, quotes, code that is indented.
_ALONE = re.compile(r"#| *\||<|>| {4}|\[\S+\]:")
_ITEM = re.compile(r"( *)([*+-]|\d+\.) +")
#: No line may begin with what would be a heading, a quote, a cell or an item there, nor break a
#: short piece of code.
_GLUED = re.compile(r" (?=(?:[*+>|#-]|\d+\.) )|`[^`]{1,40}`")


def pages() -> list[Path]:
    """Every document of ours."""
    globs = ("*.md", "docs/**/*.md", "*/README.md", "models/*/README.md", "deploy/*/README.md")
    return sorted({page for pattern in globs for page in ROOT.glob(pattern)})


def wrapped(text: str) -> str:
    """`text` with each paragraph and item that has a line of more than WIDTH columns wrapped
    anew."""
    lines: list[str] = []
    for is_prose, block in _blocks(text.split("\n")):
        lines += _rewrapped(block) if is_prose and max(map(len, block)) > WIDTH else block
    return "\n".join(lines)


def _is_prose(lines: Iterable[str]) -> Iterator[bool]:
    fence, is_generated = False, False
    for line in lines:
        is_fence = _FENCE.match(line) is not None
        is_generated = (is_generated or line.startswith(_BEGIN)) and not line.startswith(_END)
        yield not (fence or is_fence or is_generated or _ALONE.match(line))
        fence ^= is_fence


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """(True, a paragraph or item) or (False, a line that is neither)."""
    block: list[str] = []
    for line, is_prose in zip(lines, _is_prose(lines), strict=True):
        is_text = is_prose and bool(line.strip())
        if block and (not is_text or _ITEM.match(line)):
            yield True, block
            block = []
        if is_text:
            block.append(line)
        else:
            yield False, [line]
    if block:
        yield True, block


def _rewrapped(block: list[str]) -> list[str]:
    item = _ITEM.match(block[0])
    head = item.group() if item else ""
    text = " ".join([block[0][len(head) :], *(line.strip() for line in block[1:])])
    glued = _GLUED.sub(lambda found: found.group().replace(" ", "\0"), text)
    wrapper = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = head, " " * len(head)
    return [line.replace("\0", " ") for line in wrapper.wrap(glued)]


def main() -> int:
    """0: done, or nothing to do. 1: some lines are too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    is_check = parser.parse_args().check
    changed = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = wrapped(before)
        if after != before:
            changed.append(str(page.relative_to(ROOT)))
        if not is_check:
            page.write_text(after, encoding="utf-8")
    if is_check and changed:
        sys.stderr.write(f"prose over {WIDTH} columns; run `make pages`: {', '.join(changed)}\n")
    return int(is_check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
