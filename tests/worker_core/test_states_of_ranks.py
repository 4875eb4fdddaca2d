"""Ranks with states of their own hand them over rank to rank, at unequal degrees: what follows is
what one process computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.types import Sample, Sampling, SequenceSpec, WorkerIdentity
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.state import STATE
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from engine.torch.engine import TorchEngine
from engine.transformers.source import TransformersModel
from kv_transfer.rank_port import PortConfig
from kv_transfer.send_connection import Finish, Send
from kv_transfer.ticket import TicketCommitted, TicketOffered
from tests.engine.ranks import conftest
from tests.engine.ranks.conftest import LoadRanks
from tests.support.architectures import make_checkpoint
from worker_core.build import KV_SERVICE
from worker_core.kv_channel import KvChannel

pytestmark = pytest.mark.slow

load_ranks, losses = conftest.load_ranks, conftest.losses
PATIENCE_S = 60.0
TOKENS = tuple((7 * i + 3) % 96 for i in range(24))
#: Tokens of two steps at the sender; one more follows at the receiver.
FIRST, SENT = 9, 21
GREEDY = Sampling()


@pytest.fixture(autouse=True)
def _one_loads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, and transformers loads in one thread of a process alone."""
    load, lock = TransformersModel.load_decoder, threading.Lock()

    def alone(*given: Any) -> Any:
        with lock:
            return load(*given)

    monkeypatch.setattr(TransformersModel, "load_decoder", alone)


class Worker:
    """An engine and its KV channel."""

    def __init__(self, name: str, engine: TorchEngine) -> None:
        self.engine = engine
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        config = PortConfig(WorkerIdentity(name, 1), ticket_secret="77" * 32)
        self.channel = KvChannel(config, engine, self.events.put)

    def run(self, table: Sequence[int], start: int, end: int) -> torch.Tensor:
        row = SampleRow(end - start - 1, GREEDY, (), len(TOKENS))
        part = SequenceSlice(TOKENS[start:end], start, table, (row,), len(TOKENS))
        return self.engine.logits(Batch((part,)))

    def hold(self, table: Sequence[int], slot: int) -> None:
        """Have a sequence's states in a slot."""
        self.engine.kv.slot_tables[STATE].of_block[table[0]] = slot


def handed_over(source: Worker, target: Worker) -> list[torch.Tensor]:
    """Logits after the tokens that follow at the receiver, and after those of a fork there."""
    table, other, fork = (3, 1, 6, 2), (5, 9, 4, 7), (11, 12, 13, 14)
    source.hold(table, 2)
    for start, end in ((0, FIRST), (FIRST, SENT)):
        source.run(table, start, end)
    target.hold(other, 1)
    spec = SequenceSpec("r", TOKENS[:SENT], GREEDY)
    ticket = target.channel.tickets.offer(spec, other, 0, SENT)
    if not ticket.is_known:
        assert target.events.get(timeout=PATIENCE_S) == TicketOffered(ticket.ticket_id)
    layout, sender = source.engine.spec.layout, source.channel.sender
    sender.begin("k", ticket.data)
    sender.submit(Send("k", table, KvRange(0, SENT, 0, layout.num_layers)))
    for records in groups_of(layout).records_after(SENT):
        sender.submit(Send("k", table, records))
    sender.submit(Finish("k", SENT, (Sample(7),), time.monotonic()))
    assert isinstance(event := target.events.get(timeout=PATIENCE_S), TicketCommitted), event
    assert source.events.get(timeout=PATIENCE_S).error is None
    target.channel.tickets.release(ticket.ticket_id)
    target.hold(fork, 0)
    target.engine.kv.copy_blocks(other, fork)
    found = [target.run(other, SENT, SENT + 1), target.run(other, SENT + 1, SENT + 2)]
    return [*found, target.run(fork, SENT, SENT + 2)]


@pytest.mark.parametrize(
    ("sends", "takes"),
    [
        ((2, 1), (1, 2)),
        pytest.param((2, 1), (1, 1), marks=pytest.mark.long),
        pytest.param((1, 2), (2, 1), marks=pytest.mark.long),
        pytest.param((1, 2), (2, 2), marks=pytest.mark.long),
        pytest.param((1, 1), (2, 1), marks=pytest.mark.long),
    ],
)
def test_states_go_rank_to_rank(
    sends: tuple[int, int], takes: tuple[int, int], tmp_path: Path, load_ranks: LoadRanks
) -> None:
    types = ["mamba", "attention", "mamba", "mamba", "attention", "mamba"]
    path = make_checkpoint(tmp_path, "granitemoehybrid", num_hidden_layers=6, layer_types=types)

    def worker(name: str, tensor: int, pipeline: int) -> Worker:
        options = {"pipeline_parallel_size": pipeline, "distributed_backend": "gloo"}
        more = {"model_impl": "transformers", "max_num_seqs": 4, "kv_service": KV_SERVICE}
        return Worker(name, load_ranks(path, tensor, **options, **more))

    one = worker("one", 1, 1)
    one.hold((3,), 2)
    one.run((3, 1, 6, 2), 0, FIRST)
    one.run((3, 1, 6, 2), FIRST, SENT)
    wanted = [one.run((3, 1, 6, 2), SENT + i, SENT + i + 1) for i in range(2)]
    source, target = worker("p0", *sends), worker("d0", *takes)
    found = handed_over(source, target)
    for each in (one, source, target):
        each.channel.close()
    for got, expected in zip(found, (*wanted, wanted[1]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_first_stage_without_states_is_refused(tmp_path: Path, load_ranks: LoadRanks) -> None:
    types = ["attention", "attention", "mamba"]
    path = make_checkpoint(tmp_path, "granitemoehybrid", num_hidden_layers=3, layer_types=types)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2: the first stage has no"):
        load_ranks(path, 1, pipeline_parallel_size=2, kv_service=KV_SERVICE)
