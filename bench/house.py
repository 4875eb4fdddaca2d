"""The structure of the source: `python -m bench.house`.

Prints the top-level packages with their lines (without generated code), the largest one's share,
import cycles, and imports that point up. The import graph comes from the syntax trees: imports for
type checking and inside functions count, too.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Folders of packages.
_PARENTS = (".", "kernels")

#: By module name: names of the modules that it imports.
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class House:
    """lines: by package. imports: by module, within the packages."""

    lines: Mapping[str, int]
    imports: Graph


def read_house(layers: list[list[str]], root: Path = ROOT) -> House:
    """Read the packages named in `layers`, see the contract `tiers` in pyproject.toml."""
    lines: dict[str, int] = {}
    trees: dict[str, ast.Module] = {}
    for room in (room for layer in layers for room in layer):
        parent = next(root / p for p in _PARENTS if (root / p / room).is_dir())
        for path in sorted((parent / room).rglob("*.py")):
            if "_pb2" not in path.name:
                text = path.read_text(encoding="utf-8")
                lines[room] = lines.get(room, 0) + text.count("\n")
                parts = path.relative_to(parent).with_suffix("").parts
                trees[".".join(parts).removesuffix(".__init__")] = ast.parse(text)
    return House(lines, {m: frozenset(_imports(m, t, trees)) for m, t in trees.items()})


def _imports(module: str, tree: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Modules imported by `module`. There are no relative imports: ruff's TID252."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in submodules]
        yield from (name for name in names if name in known and name != module)


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of several modules, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            begin = stack.index(module)
            if len(stack) - begin > 1:
                found.append(sorted(stack[begin:]))
            del stack[begin:]

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def upward(graph: Graph, layers: list[list[str]]) -> list[tuple[str, str]]:
    """Imports from a package to a higher one, or to another one in the same layer."""
    level = {room: number for number, layer in enumerate(layers) for room in layer}

    def points_up(module: str, other: str) -> bool:
        room, to = module.partition(".")[0], other.partition(".")[0]
        return room != to and level[to] <= level[room]

    return [(m, o) for m in sorted(graph) for o in sorted(graph[m]) if points_up(m, o)]


def room_layers(root: Path = ROOT) -> list[list[str]]:
    """Layers of the contract `tiers`, top first; packages in one layer do not import each other."""
    with (root / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (tiers,) = (contract for contract in contracts if contract["id"] == "tiers")
    return [[room.strip() for room in layer.split("|")] for layer in tiers["layers"]]


if __name__ == "__main__":
    layers = room_layers()
    house = read_house(layers)
    total = sum(house.lines.values())
    for room, num_lines in sorted(house.lines.items(), key=lambda item: -item[1]):
        print(f"{room:16}{num_lines:8}{num_lines / total:7.1%}")
    found, arrows = circles(house.imports), upward(house.imports, layers)
    largest = max(house.lines, key=house.lines.__getitem__)
    print(f"largest room: {largest}, {house.lines[largest] / total:.1%} of {total} lines")
    print(f"circles: {len(found)}", *(" <-> ".join(circle) for circle in found), sep="\n  ")
    print(f"upward: {len(arrows)}", *(f"{a} -> {b}" for a, b in arrows), sep="\n  ")
    sys.exit(bool(found or arrows))
