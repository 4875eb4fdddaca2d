"""The transports of KV, for parametrize. Those without their package are skipped.

cuda_ipc moves through host memory here: see device_double.py."""

from __future__ import annotations

import pytest

from baton import kv_transports

#: Between processes.
REMOTE = [
    pytest.param(
        each.name,
        marks=pytest.mark.skipif(not each.is_installed, reason=f"needs {each.package}"),
    )
    for each in kv_transports.REMOTE
]
ALL = ["loopback", *REMOTE]
