"""Modules import each other in one direction, and rooms stand in the order of their layers."""

from __future__ import annotations

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
