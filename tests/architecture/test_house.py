"""Modules import each other in one direction. import-linter holds the order of rooms."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from bench.house import circle, count_lines, imports, report


def test_no_circles() -> None:
    graph = imports()
    assert graph["worker_core.worker"], "the graph has edges"
    assert not circle(graph)


def test_a_circle_is_found() -> None:
    graph = {
        "a": frozenset({"b", "d"}),
        "b": frozenset({"c"}),
        "c": frozenset({"a"}),
        "d": frozenset[str](),
    }
    found = circle(graph)
    assert set(found) == {"a", "b", "c"}
    assert all(one in graph[other] for one, other in pairwise(found))


def test_lines_are_counted_by_room_and_by_package_in_it(tmp_path: Path) -> None:
    sizes = {"one.py": 3, "inner/two.py": 5, "inner/deep/three.py": 7, "v1/made_pb2.py": 90}
    for name, num_lines in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n" * num_lines)
    lines = count_lines(tmp_path)
    assert lines == {"": 3, "inner": 12}
    texts = list(report({"room": lines}))
    assert texts[0].split() == ["room", "15", "100.0%"]
    assert texts[1].split() == ["room/inner", "12", "80.0%"]
    assert "largest within a room: room/inner, 80.0%" in texts[-1]
