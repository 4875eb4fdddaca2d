"""The ways that KV travels, for parametrize. nixl is left out where its library is not installed.

cuda_ipc moves through host memory here: see device_double.py."""

from __future__ import annotations

import pytest

from kv_transfer.transport.nixl import has_nixl

_NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(not has_nixl(), reason="the nixl library is not installed")
)
#: Between processes.
REMOTE = ["shm", "tcp", _NIXL, "cuda_ipc"]
ALL = ["loopback", *REMOTE]
