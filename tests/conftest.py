"""Options of the whole suite, and the levels of CPU kernels that a test runs at."""

from __future__ import annotations

import atexit
import gc
import os
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from baton_kernels.cpu.library import (
    LEVEL_VARIABLE,
    NO_LEVEL,
    chosen_level,
    levels_of_machine,
    library,
)
from tests.support.without import THINGS, take_away

_FORCED = os.environ.get(LEVEL_VARIABLE)
LEVELS = (_FORCED,) if _FORCED else levels_of_machine() or (NO_LEVEL,)

# An example may take as long as a busy machine needs for it.
_MANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
#: As many as hypothesis has by itself, of properties that ask for no number of their own (.ci/run).
settings.register_profile("many examples", _MANY)
settings.register_profile("some examples", settings(_MANY, max_examples=50))
settings.load_profile("some examples")
#: Between two edits (make test-fast): few examples of each property, however many it asks for.
_FEW = settings(_MANY, max_examples=10)
settings.register_profile("few examples", _FEW)
#: And few cases of each test that is parametrised, unless its mark few_cases says another number.
_FEW_CASES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-seeds", type=int, default=6, help="Seeds that the simulated mix of everything runs."
    )
    parser.addoption("--first-seed", type=int, default=0, help="The first of them.")
    parser.addoption("--long", action="store_true", help="Tests that are marked long, too.")
    parser.addoption(
        "--without",
        action="append",
        choices=THINGS,
        default=[],
        help="As on a machine that lacks this; may be repeated.",
    )


def pytest_configure(config: pytest.Config) -> None:
    things = config.getoption("--without")
    # Workers of xdist inherit what the process that starts them lacks.
    if things and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        take_away(things, Path(folder.name))


#: The line of a module with slow tests only.
_ALL_ARE_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


class _LeftOut(pytest.Module):
    """A module that is not imported, so that what its imports cost is saved, too."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if parent.config.getoption("markexpr") != "not slow":
        return None
    if not _ALL_ARE_SLOW.search(module_path.read_text()):
        return None
    left_out: pytest.Module = _LeftOut.from_parent(parent, path=module_path)
    return left_out


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported modules stay, so the garbage collector need not examine them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Extensions complain of what is left when the interpreter ends.
        atexit.register(gc.unfreeze)


# Last: cases that -m leaves out are none of the few.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = items
    if not config.getoption("--long"):
        run = [item for item in items if not item.get_closest_marker("long")]
        for item in set(items).difference(run):
            item.add_marker(pytest.mark.skip(reason="takes long: --long, as in .ci/run"))
    if settings.get_current_profile_name() == "few examples":
        left_out = cases_beyond_few(run)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        for item in items:
            _bound_examples(item)


def cases_beyond_few(items: list[pytest.Item]) -> set[pytest.Item]:
    """All but the first case of each test and some more, which are the same in every run.

    They are drawn: cases at equal distances would have but one value of an inner parameter.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for test, (_, *others) in cases.items():
        mark = others[0].get_closest_marker("few_cases") if others else None
        num_left_out = len(others) + 1 - (mark.args[0] if mark else _FEW_CASES)
        if num_left_out > 0:
            left_out.update(random.Random(test).sample(others, num_left_out))
    return left_out


def _bound_examples(item: pytest.Item) -> None:
    """Bound the examples of a property or state machine that sets a number of its own."""
    machine = getattr(item, "cls", None)
    for owner, name in (
        (getattr(item, "obj", None), "_hypothesis_internal_use_settings"),
        (machine, "settings"),
    ):
        own = getattr(owner, name, None)
        if isinstance(own, settings) and own.max_examples > _FEW.max_examples:
            setattr(owner, name, settings(own, max_examples=_FEW.max_examples))


#: Those between the best and the lowest are .ci/run's: each has a library of its own to build, and
#: shares its code with the one or its order of operations with the other.
_LEVEL_PARAMS = [
    pytest.param(level, marks=pytest.mark.long if level in LEVELS[1:-1] else ()) for level in LEVELS
]


@pytest.fixture(params=_LEVEL_PARAMS)
def each_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs at every level that this machine has, or at the one that is forced.

    For what engines do: the kernels by themselves are tests/kernels/cpu/test_program.py's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEVEL_VARIABLE, request.param)
        _forget_level()
        yield
    # Not before: who asked in between would have all later tests run at this level.
    _forget_level()


def _forget_level() -> None:
    chosen_level.cache_clear()
    library.cache_clear()
