"""How many seeds the mix of everything runs; the first few are for `make test-fast`, too."""

from __future__ import annotations

import pytest

NUM_FAST_SEEDS = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("mix_seed", "chaos_seed"):
        if name in metafunc.fixturenames:
            num_seeds = metafunc.config.getoption("--num-seeds")
            metafunc.parametrize(
                name,
                [
                    pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_FAST_SEEDS else ())
                    for seed in range(num_seeds)
                ],
            )
