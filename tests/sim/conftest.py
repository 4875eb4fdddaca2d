"""Which seeds the simulations run; the first is for `make test-fast`, too."""

from __future__ import annotations

import pytest

NUM_FAST_SEEDS = 1
#: Of the first ones; .ci/run has others besides, and make explore fresh ones.
LONG_SEEDS = range(3, 6)

#: Seeds of chaos that showed a fault once; they run beside the first ones.
TELLING_SEEDS = (70_265, 900_891)


def _marks(seed: int) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] if seed >= NUM_FAST_SEEDS else []
    return [*slow, pytest.mark.long] if seed in LONG_SEEDS else slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("mix_seed", "chaos_seed", "core_seed"):
        if name in metafunc.fixturenames:
            first = metafunc.config.getoption("--first-seed")
            seeds = [*range(first, first + metafunc.config.getoption("--num-seeds"))]
            if name == "chaos_seed" and not first:
                seeds += TELLING_SEEDS
            metafunc.parametrize(
                name,
                [pytest.param(seed, marks=_marks(seed)) for seed in seeds],
            )
