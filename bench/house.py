"""The structure of the source: `python -m bench.house`.

Prints the lines of each top-level package and of the packages directly in it (without generated
code), the largest ones' shares, and a circle of imports if there is one. Imports for type checking
and inside functions count, too. import-linter holds the direction of imports (`make check`).
"""

from __future__ import annotations

import graphlib
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]

#: Folders of packages.
_PARENTS = (ROOT, ROOT / "kernels")

#: By module name: names of the modules that it imports.
Graph = Mapping[str, frozenset[str]]


def rooms() -> list[str]:
    """Top-level packages, as import-linter reads them from pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return list(settings["tool"]["importlinter"]["root_packages"])


def count_lines(folder: Path) -> Counter[str]:
    """Lines of a package's sources by package directly in it; "" for files of its own."""
    lines: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        if "_pb2" not in path.name:
            inner, *rest = path.relative_to(folder).parts
            lines[inner if rest else ""] += path.read_text(encoding="utf-8").count("\n")
    return lines


def imports() -> Graph:
    """The import graph of all rooms."""
    graph = grimp.build_graph(*rooms(), cache_dir=None)
    return {
        name: frozenset(graph.find_modules_directly_imported_by(name)) for name in graph.modules
    }


def circle(graph: Graph) -> list[str]:
    """A circle of modules, each imported by the next one; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def report(lines: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Lines of text, from `count_lines` of each room."""
    total = sum(room.total() for room in lines.values())
    inner = {f"{room}/{name}": n for room, inside in lines.items() for name, n in inside.items()}
    for room in sorted(lines, key=lambda room: -lines[room].total()):
        yield f"{room:28}{lines[room].total():8}{lines[room].total() / total:7.1%}"
        for name, num_lines in (+lines[room]).most_common():
            yield f"  {f'{room}/{name}':26}{num_lines:8}{num_lines / total:7.1%}"
    room = max(lines, key=lambda room: lines[room].total())
    within = max(inner, key=inner.__getitem__)
    yield (
        f"{total} lines; largest room: {room}, {lines[room].total() / total:.1%}; "
        f"largest within a room: {within}, {inner[within] / total:.1%}"
    )


if __name__ == "__main__":
    folders = {room: next(p / room for p in _PARENTS if (p / room).is_dir()) for room in rooms()}
    print(*report({room: count_lines(folder) for room, folder in folders.items()}), sep="\n")
    found = circle(imports())
    print("circles:", " <- ".join(found) or "none")
    sys.exit(bool(found))
