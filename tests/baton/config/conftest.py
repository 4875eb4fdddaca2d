"""No test sees the caller's own BATON_* variables."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
