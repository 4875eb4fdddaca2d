"""How many seeds the mix of everything runs."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mix_seed" in metafunc.fixturenames:
        num_seeds = metafunc.config.getoption("--num-seeds")
        metafunc.parametrize("mix_seed", range(num_seeds))
