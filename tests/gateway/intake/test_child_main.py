"""A helper process starts without what only its parent needs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["gateway.chat.template", "gateway.intake.text_tokenizer"])
def test_a_helper_loads_neither_grpc_nor_asyncio(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'asyncio', 'grpc'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
