"""How many seeds the mix of everything runs."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("mix_seed", "chaos_seed"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(metafunc.config.getoption("--num-seeds")))
