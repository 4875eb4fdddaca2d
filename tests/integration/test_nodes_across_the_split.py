"""Two workers of two hosts each (here: of one) hand over rank to rank: the tokens are those of
transformers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.client import AsyncClient
from tests.integration.test_ranks_across_the_split import PROMPTS, greedy, model
from tests.support.metrics_page import free_ports
from tests.support.transformers_greedy import greedy_outputs

pytestmark = [pytest.mark.slow, pytest.mark.long]

__all__ = ["model"]
BATON = Path(sys.executable).parent / "baton"
WORKER = ("--dtype=float32", "--num-gpu-blocks-override=200", "--num-threads=2", "--nnodes=2")


@pytest.fixture
def gateway(model: Path) -> Iterator[str]:
    """The address of a gateway before a prefill worker cut by heads and a decode worker cut by
    layers."""
    gate, http, prefill, decode, *masters = free_ports(6)
    tiers = (
        ("prefill", prefill, "--tensor-parallel-size=2"),
        ("decode", decode, "--pipeline-parallel-size=2", "--max-local-prefill-tokens=0"),
    )
    commands = [
        (tier, str(model), *WORKER, *options, f"--master-port={master}", *own)
        for (tier, port, *options), master in zip(tiers, masters, strict=True)
        for own in (("--node-rank=1",), (f"--port={port}",))
    ]
    ends = (f"--prefill-workers=127.0.0.1:{prefill}", f"--decode-workers=127.0.0.1:{decode}")
    commands.append(("gateway", str(model), f"--port={gate}", f"--http-port={http}", *ends))
    processes: list[subprocess.Popen[str]] = []
    try:
        for some in (commands[:4], commands[4:]):
            started = [start(command) for command in some]
            processes += started
            for process in started:
                wait_ready(process)
        yield f"127.0.0.1:{gate}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate()


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([str(BATON), *command], stderr=subprocess.PIPE, text=True)


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr
    assert any('"message": "ready ' in line for line in process.stderr), "it has ended"


async def test_hosts_hand_over_rank_to_rank(model: Path, gateway: str) -> None:
    async with AsyncClient(gateway) as client:
        done = await asyncio.gather(*(client.generate(p, greedy(20)) for p in PROMPTS))
    assert [list(each.token_ids) for each in done] == greedy_outputs(model, PROMPTS, 20)
    assert all(each.timing.transfer_bytes for each in done)
