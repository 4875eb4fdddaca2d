"""Workers that are started by hand, together, never outgrow the memory that they share."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.memory_group import memory_group
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long]

GIB = 1 << 30
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
#: 64 KiB of KV a token: 8 GiB for sixteen sequences.
WIDE = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16}


def test_four_workers_in_four_gib(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", **WIDE, head_dim=64, max_position_embeddings=8192)
    worker = [sys.executable, "-P", "-m", "decode_svc", str(model), "--port=0", "--device=cpu"]
    pipe = subprocess.PIPE
    with memory_group(4 * GIB) as group:
        command = group.command(*worker)
        workers = [subprocess.Popen(command, stderr=pipe, text=True) for _ in range(4)]
        try:
            kv_bytes = [until_ready(each) for each in workers]
            assert all(0 < each <= GIB for each in kv_bytes), kv_bytes
            # Threads touch all pages of KV from now on.
            deadline_s = time.monotonic() + 60
            while any(touched(worker) < own for worker, own in zip(workers, kv_bytes, strict=True)):
                assert time.monotonic() < deadline_s
            assert sum(kv_bytes) < group.used_bytes < 4 * GIB
            assert group.num_killed == 0
            assert [each.poll() for each in workers] == [None] * 4
        finally:
            for each in workers:
                each.terminate()
            for each in workers:
                each.communicate()


def until_ready(worker: subprocess.Popen[str]) -> int:
    """Bytes of KV in its memory plan."""
    assert worker.stderr
    num_bytes = 0
    for line in worker.stderr:
        if found := re.search(r"memory plan: KV cache: ([0-9.e+]+) (\w+)", line):
            num_bytes = int(float(found[1]) * UNITS[found[2]])
        if '"message": "ready ' in line:
            return num_bytes
    raise AssertionError("it has ended")


def touched(worker: subprocess.Popen[str]) -> int:
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return sum(int(kb) for kb in re.findall(r"RssAnon:\s+(\d+)", status)) * 1024
