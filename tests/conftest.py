"""Options of the whole suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# An example may take as long as a busy machine needs for it.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-seeds", type=int, default=20, help="Seeds that the simulated mix of everything runs."
    )
