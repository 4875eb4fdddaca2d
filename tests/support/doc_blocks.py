"""The command blocks of our documents, and what is said about running them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Languages of blocks that somebody may copy and run.
RUNNABLE = ("bash", "sh", "console", "python", "js")

SERVER = "a running server"

#: What a mark may say, by its kind; a kind without a text here says why, in its own words.
MARKS = {
    "needs": frozenset({SERVER, f"{SERVER} and grpcurl", f"{SERVER} and Node.js"}),
    "serves": frozenset({"each line by itself", "all lines together"}),
    "runs with": None,
    "dry run": None,
    "not run": None,
}

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(rf"<!-- *({'|'.join(MARKS)}): *(.*?) *-->\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """line: of the fence, from 1. kind: of the mark before it, one of MARKS, empty if there is
    none; told: what it says."""

    page: str
    line: int
    language: str
    text: str
    kind: str = ""
    told: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """Its commands, those that go on after a backslash as one."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line]


def blocks_of(path: Path, root: Path) -> Iterator[Block]:
    """The runnable blocks of one page. A mark is a comment right before the fence; other comments
    say nothing here."""
    content = path.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(content):
        language, text = fence.groups()
        if language not in RUNNABLE:
            continue
        mark = _MARK.search(content[: fence.start()])
        kind, told = mark.groups() if mark else ("", "")
        line = content.count("\n", 0, fence.start()) + 1
        yield Block(str(path.relative_to(root)), line, language, text, kind, told)


def commands_of(block: Block) -> list[tuple[str, str]]:
    """(command, output that the page shows below it) of a console block."""
    commands: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), ""))
        elif commands:
            command, shown = commands[-1]
            commands[-1] = (command, f"{shown}{line}\n")
    return commands
