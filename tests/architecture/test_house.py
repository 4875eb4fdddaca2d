"""Modules import each other in one direction, and rooms stand in the order of their layers."""

from __future__ import annotations

from pathlib import Path

from bench.house import circles, read_house, room_layers, upward


def test_no_circles_and_no_imports_that_point_up() -> None:
    layers = room_layers()
    imports = read_house(layers).imports
    assert imports["worker_core.worker"], "the graph has edges"
    assert not circles(imports)
    assert not upward(imports, layers)


def test_circles_and_upward_imports_are_found() -> None:
    graph = {
        "low.a": frozenset({"low.b", "low.d"}),
        "low.b": frozenset({"low.c"}),
        "low.c": frozenset({"low.a", "high.e"}),
        "low.d": frozenset[str](),
        "high.e": frozenset({"low.d", "beside.f"}),
        "beside.f": frozenset[str](),
    }
    assert circles(graph) == [["low.a", "low.b", "low.c"]]
    assert upward(graph, [["high", "beside"], ["low"]]) == [
        ("high.e", "beside.f"),
        ("low.c", "high.e"),
    ]


def test_every_form_of_import_counts(tmp_path: Path) -> None:
    files = {
        "a/one.py": "import b.two\n",
        "a/later.py": "def f():\n    from b import two\n",
        "a/typed.py": "if TYPE_CHECKING:\n    from b.two import Name\n",
        "a/alone.py": "import os\n",
        "b/two.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    imports = read_house([["a"], ["b"]], tmp_path).imports
    importing = {module for module, imported in imports.items() if imported == {"b.two"}}
    assert importing == {"a.one", "a.later", "a.typed"}
