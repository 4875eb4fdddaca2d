"""Ranks as processes: what the death of one means to the others."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.errors import ModelError, StartupError
from baton.types import KvLayout, Sampling
from engine.families.read import read_config
from engine.interface import Batch, SequenceSlice
from engine.kv.tensors.ranks import pool_sizes
from engine.ranks import start
from engine.ranks.exchange import ExchangeFailed
from engine.ranks.mesh import Degrees
from engine.ranks.parts import rank_parts
from engine.ranks.rank_spec import RankSpec, staging_bytes
from engine.ranks.team import RankTeam
from engine.torch.engine import TorchEngine
from tests.support.drive_engine import generate
from tests.support.engines import load_engine
from tests.support.processes import child_pids, rank_pids
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

PROMPTS = [(5, 9, 200), tuple(range(20))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def losses() -> queue.Queue[str]:
    return queue.Queue()


@pytest.fixture
def engine(
    model: Path, losses: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TorchEngine]:
    """An engine of two ranks."""
    monkeypatch.setattr(start, "RankTeam", partial(RankTeam, on_loss=losses.put))
    made = load_engine(str(model), num_blocks=32, tensor_parallel_size=2)
    yield made
    made.close()


def test_a_killed_rank_is_told_of(
    model: Path, engine: TorchEngine, losses: queue.Queue[str]
) -> None:
    expected = generate(load_engine(str(model), num_blocks=32), PROMPTS, Sampling(), 5)
    assert generate(engine, PROMPTS, Sampling(), 5) == expected
    assert losses.empty()
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    assert losses.get() == f"rank 1 of 2 (pid {pid}) ended with status -9"


def test_a_frozen_rank_is_told_of_and_killed(engine: TorchEngine, losses: queue.Queue[str]) -> None:
    generate(engine, PROMPTS[:1], Sampling(), 2)
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGSTOP)
    told = f"rank 1 of 2 (pid {pid}) has sent nothing for 1.5 s (frozen, or out of reach)"
    assert losses.get() == told
    engine.close()
    assert not rank_pids()


def test_a_frozen_rank_does_not_hold_up_the_end(engine: TorchEngine) -> None:
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGSTOP)
    engine.close()
    assert not rank_pids()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_loss_amid_an_exchange_over_gloo_names_the_rank(
    model: Path, is_frozen: bool, losses: queue.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "RankTeam", partial(RankTeam, on_loss=losses.put))
    engine = load_engine(
        str(model), num_blocks=32, tensor_parallel_size=2, distributed_backend="gloo"
    )
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGSTOP if is_frozen else signal.SIGKILL)
    with pytest.raises(ExchangeFailed):
        engine.forward(Batch((SequenceSlice((5,), 0, (0,)),)))
    silent = "has sent nothing for 1.5 s (frozen, or out of reach)"
    how = silent if is_frozen else "ended with status -9"
    assert losses.get() == f"rank 1 of 2 (pid {pid}) {how}"
    engine.close()
    assert not rank_pids()


def test_an_error_amid_a_step_is_a_loss_and_the_other_rank_can_be_ended(
    engine: TorchEngine, losses: queue.Queue[str]
) -> None:
    def broken(_first: int, _count: int) -> None:
        raise RuntimeError("a hook")

    with pytest.raises(RuntimeError, match="a hook"):
        engine.forward(Batch((SequenceSlice((5,), 0, (0,)),)), broken)
    assert losses.get() == "the ranks of the engine are apart"
    engine.close()  # the other one waits for this one in the middle of a layer
    assert not rank_pids()


def test_a_rank_that_cannot_load_is_told_of(model: Path, tmp_path: Path) -> None:
    config = read_config(model)
    layout = KvLayout("", config.num_layers, config.num_kv_heads, config.head_dim, "float32", 8)
    room = staging_bytes(config, 2, "float32")
    pools = pool_sizes(layout, 4, 0, rank_parts(layout, Degrees(2)))
    spec = RankSpec(0, Degrees(2), "shm", str(tmp_path), config, "float32", pools, 1, room)
    without_model, with_another = RankTeam(spec), RankTeam(replace(spec, folder=str(model)))
    with pytest.raises(StartupError, match=r"rank 1 of 2 \(pid \d+\) ended before it had loaded"):
        without_model.wait_ready("")
    without_model.close()
    with pytest.raises(ModelError, match=r"rank 1 of 2 .* has read another checkpoint"):
        with_another.wait_ready("another digest")
    with_another.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_rank_0(model: Path, signum: int) -> None:
    program = (
        "from tests.support.engines import load_engine\n"
        "from baton.types import Sampling\n"
        "from tests.support.drive_engine import generate\n"
        f"engine = load_engine({str(model)!r}, num_blocks=4, tensor_parallel_size=2)\n"
        "generate(engine, [(5,)], Sampling(), 2)\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == b"ready\n"
        (pid,) = child_pids(leader.pid)
        follower = os.pidfd_open(pid)
        leader.send_signal(signum)
        select.select([follower], [], [])  # readable once it has ended
        leader.kill()
    os.close(follower)
