"""The native library, or a skip where this machine can have none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from baton_kernels.cpu.library import library


@pytest.fixture(scope="session", autouse=True)
def native() -> ctypes.CDLL:
    found = library()
    if found is None:
        pytest.skip("no native CPU kernels on this machine")
    return found


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
