"""Count docstrings and comments that need a second reading, by room: `python scripts/prose.py
[--list] [ROOM ...]`; `--draw N` prints N docstrings, comments and help texts at random."""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    *("baton", "gateway", "worker_core", "kv_transfer", "engine", "distill", "kernels"),
    *("prefill_svc", "decode_svc", "bench", "scripts", "models"),
)
#: Patterns of sentences that are read twice.
RIDDLES = re.compile(
    r"\b(whose|whom|whoever|whatever|is told|are told)\b"
    r"|(?:^|[.:]\s+)(Of|Nor|But for|So many|So long|What is|What are|Those that|Such)\b",
    re.MULTILINE,
)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, attribute docstring and block of comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    block, last = "", -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# noqa", "# type:")):
            continue
        text, line = token.string.lstrip("#: "), token.start[0]
        if line != last + 1 and block:
            yield last, block
            block = ""
        block, last = f"{block} {text}".strip(), line
    if block:
        yield last, block


def files_of(room: str) -> list[Path]:
    """Python files that we write."""
    found = sorted((ROOT / room).rglob("*.py"))
    return [path for path in found if "v1" not in path.parts and ".venv" not in path.parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", default=ROOMS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--draw", type=int, default=0)
    given = parser.parse_args()
    texts = [
        (room, path, line, text)
        for room in given.rooms
        for path in files_of(room)
        for line, text in texts_of(path)
    ]
    if given.draw:
        for _, path, line, text in random.sample(texts, given.draw):
            print(f"{path.relative_to(ROOT)}:{line}\n    {' '.join(text.split())}\n")
        return
    for room in given.rooms:
        own = [each for each in texts if each[0] == room]
        bad = [each for each in own if RIDDLES.search(each[3])]
        print(f"{room:12} {len(own):6} texts {len(bad):6} to read twice")
        for _, path, line, text in bad if given.list else ():
            print(f"  {path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:120]}")


if __name__ == "__main__":
    main()
