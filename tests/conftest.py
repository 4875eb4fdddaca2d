"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-seeds", type=int, default=20, help="Seeds that the simulated mix of everything runs."
    )
