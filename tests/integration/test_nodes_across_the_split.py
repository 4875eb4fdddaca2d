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
from tests.integration.test_ranks_across_the_split import PROMPTS, greedy, hybrid, model
from tests.support.metrics_page import free_ports
from tests.support.tiny_models import make_tiny_model
from tests.support.transformers_greedy import greedy_outputs

pytestmark = [pytest.mark.slow, pytest.mark.long]

__all__ = ["hybrid", "model"]
BATON = Path(sys.executable).parent / "baton"
WORKER = ("--dtype=float32", "--num-gpu-blocks-override=400", "--num-threads=2", "--nnodes=2")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("long")
    return make_tiny_model(folder, max_position_embeddings=8192, **sizes)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Path:
    """The model's folder."""
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def gateway(path: Path, prefill_degrees: str, decode_degrees: str) -> Iterator[str]:
    """The address of a gateway before a prefill and a decode worker."""
    gate, http, prefill, decode, *masters = free_ports(6)
    tiers = (
        ("prefill", prefill, prefill_degrees),
        ("decode", decode, decode_degrees, "--max-local-prefill-tokens=0"),
    )
    commands = [
        (tier, str(path), *WORKER, *options, f"--master-port={master}", *own)
        for (tier, port, *options), master in zip(tiers, masters, strict=True)
        for own in (("--node-rank=1",), (f"--port={port}",))
    ]
    ends = (f"--prefill-workers=127.0.0.1:{prefill}", f"--decode-workers=127.0.0.1:{decode}")
    commands.append(("gateway", str(path), f"--port={gate}", f"--http-port={http}", *ends))
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


#: Longer than one chunk, and each cut among the ranks of a context.
LONG = [[(7 * i + j) % 250 for i in range(n)] for j, n in enumerate((4096, 900))]


@pytest.mark.parametrize(
    ("path", "prefill_degrees", "decode_degrees", "prompts"),
    [
        ("model", "--tensor-parallel-size=2", "--pipeline-parallel-size=2", PROMPTS),
        ("long_model", "--context-parallel-size=2", "--tensor-parallel-size=2", [*PROMPTS, *LONG]),
        ("hybrid", "--tensor-parallel-size=2", "--pipeline-parallel-size=2", PROMPTS),
    ],
    indirect=["path"],
)
async def test_hosts_hand_over_rank_to_rank(
    path: Path, gateway: str, prompts: list[list[int]]
) -> None:
    async with AsyncClient(gateway) as client:
        done = await asyncio.gather(*(client.generate(p, greedy(20)) for p in prompts))
    assert [list(each.token_ids) for each in done] == greedy_outputs(path, prompts, 20)
    assert all(each.timing.transfer_bytes for each in done)
