"""These tests run Triton kernels on the CPU, in a process of their own:
tests/kernels/test_interpreted.py starts it.

Whether a kernel is interpreted is settled when Triton is imported, so that it cannot be switched
within a process.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if not collect_ignore_glob:
    from bench.gpu.interpreter import mend_interpreter

    mend_interpreter()
