"""Which cases of a parametrised test `make test-fast` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import cases_beyond_few


@dataclass(frozen=True)
class Case:
    """The attributes of pytest's items that few_cases reads."""

    nodeid: str
    mark: int | None

    def get_closest_marker(self, name: str) -> object:
        assert name == "few_cases"
        return None if self.mark is None else Mark((self.mark,))


@dataclass(frozen=True)
class Mark:
    args: tuple[int]


#: Number of cases and argument of the mark, by test.
TESTS = st.lists(st.tuples(st.integers(1, 40), st.none() | st.integers(1, 40)), max_size=5)


def cases_of(tests: list[tuple[int, int | None]]) -> list[list[Any]]:
    return [
        [Case(f"t.py::test_{test}[{case}-a::b[0]]", mark) for case in range(num_cases)]
        for test, (num_cases, mark) in enumerate(tests)
    ]


@given(TESTS)
def test_as_many_as_are_asked_for_and_the_first_in_any_case(
    tests: list[tuple[int, int | None]],
) -> None:
    matrix = cases_of(tests)
    left_out = cases_beyond_few([case for cases in matrix for case in cases])
    for cases, (num_cases, mark) in zip(matrix, tests, strict=True):
        kept = [case for case in cases if case not in left_out]
        assert len(kept) == min(num_cases, mark or 8)
        assert kept[0] == cases[0]


def test_the_same_in_every_worker_and_every_value_of_an_inner_parameter_gets_its_turn() -> None:
    items: list[Any] = [Case(f"t.py::test[{n // 8}-{n % 8}]", None) for n in range(64)]
    left_out = cases_beyond_few(items)
    assert left_out == cases_beyond_few(items)
    inner = {case.nodeid[-2] for case in items if case not in left_out}
    assert len(inner) >= 3
