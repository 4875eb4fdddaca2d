"""A worker on two nodes: node 0 is an engine in this process, node 1 the command of a user."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from baton.errors import StartupError
from baton.types import Sampling
from engine.ranks import start
from engine.ranks.nodes import Nodes
from engine.ranks.team import RankTeam
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.processes import rank_pids
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

PROMPTS = [(5, 9, 200), tuple(range(20))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[str]:
    found: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(start, "RankTeam", partial(RankTeam, on_loss=found.put))
    return found


@contextmanager
def node_1(model: Path, port: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    options = (
        *("--colocated", "--tensor-parallel-size=2", "--nnodes=2", "--node-rank=1"),
        *(f"--master-port={port}", "--nodes-timeout-s=60", *more),
    )
    command = (sys.executable, "-P", "-m", "decode_svc", *options, "--", str(model))
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        yield process
        process.kill()


def node_0(model: Path, nodes: Nodes) -> TorchEngine:
    return load_engine(
        str(model), num_blocks=32, tensor_parallel_size=2, nodes=nodes, on_plan=lambda _: None
    )


def two_nodes() -> Nodes:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Nodes(2, port=listener.getsockname()[1], timeout_s=60.0)


def wait_for_end(process: subprocess.Popen[bytes]) -> int:
    fd = os.pidfd_open(process.pid)
    select.select([fd], [], [])
    os.close(fd)
    return process.wait()


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_two_nodes_generate_the_tokens_of_one_and_a_lost_rank_ends_both(
    model: Path, losses: queue.Queue[str], signum: signal.Signals
) -> None:
    one = load_engine(str(model), num_blocks=32, on_plan=lambda _: None)
    wanted = token_ids(generate(one, PROMPTS, Sampling(), 8))
    nodes = two_nodes()
    with node_1(model, nodes.port) as node:
        engine = node_0(model, nodes)
        assert token_ids(generate(engine, PROMPTS, Sampling(), 8)) == wanted
        (rank,) = rank_pids(node.pid)
        os.kill(rank, signum)
        silent = "has sent nothing for 1.5 s (frozen, or out of reach)"
        how = "ended" if signum == signal.SIGKILL else silent
        assert losses.get() == f"rank 1 of 2 on node 1 (127.0.0.1) {how}"
        engine.close()
        status = wait_for_end(node)
        assert status == (1 if signum == signal.SIGKILL else 0)


@pytest.mark.long
def test_a_node_ends_with_node_0(model: Path, losses: queue.Queue[str]) -> None:
    nodes = two_nodes()
    with node_1(model, nodes.port) as node:
        node_0(model, nodes).close()
        assert wait_for_end(node) == 0
    assert losses.empty()


@pytest.mark.long
def test_both_nodes_say_what_does_not_fit(model: Path) -> None:
    nodes = two_nodes()
    with node_1(model, nodes.port, "--pipeline-parallel-size=2") as node:
        with pytest.raises(StartupError, match="has --pipeline-parallel-size 2") as told:
            node_0(model, nodes)
        assert node.stderr is not None
        text = node.stderr.read().decode()
        assert wait_for_end(node) == 2
    assert f"error: {told.value.message}" in text
