"""Nodes of one worker: their engine computes what one rank does, and a node that does not fit is
refused by one line on both sides."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.errors import ConfigError, ModelError, StartupError
from baton.types import Sampling
from baton_kernels.cpu.library import library
from engine.follower import follow
from engine.kv.range import KvRange
from engine.ranks import node_agent, nodes, start
from engine.ranks.link import Link
from engine.ranks.mesh import Degrees
from engine.ranks.node_agent import NodeAgent
from engine.ranks.node_listener import NodeListener
from engine.ranks.nodes import Nodes, files_digest
from engine.ranks.team import RankTeam
from engine.torch.engine import TorchEngine
from tests.engine.ranks.test_ranks_same_as_one import KINDS, batch_of
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from tests.support.rank_specs import BOX
from tests.support.rank_threads import start_thread
from tests.support.tiny_models import Family, make_tiny_model

DEGREES = Degrees(4)
NOT_CANCELLED = threading.Event()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def two_nodes(**more: Any) -> Nodes:
    return Nodes(2, "127.0.0.1", free_port(), timeout_s=30.0, **more)


def agent_of(nodes: Nodes, folder: Path = BOX, node: int = 1, **more: Any) -> NodeAgent:
    return NodeAgent(nodes, node, more.pop("degrees", DEGREES), folder)


def follow_in_thread(control: socket.socket, link: socket.socket, _: socket.socket) -> Mock:
    """In place of a process: see engine.ranks.team.run_rank."""
    own_control, own_link = (each.dup() for each in (control, link))
    closed = threading.Event()

    def run() -> None:
        link_to_0 = Link(own_link, "rank 0", closed.set, lambda _: closed.set())
        with own_control:
            follow(own_control, link_to_0)
        link_to_0.close()

    threading.Thread(target=run, daemon=True).start()
    return Mock(pid=os.getpid())


@pytest.fixture
def load_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TorchEngine]]:
    """Loads an engine of two nodes, with threads in place of processes."""
    monkeypatch.setattr(start, "RankTeam", partial(RankTeam, start=start_thread, on_loss=print))
    monkeypatch.setattr(node_agent, "run_rank", follow_in_thread)
    monkeypatch.setattr(node_agent, "start_pulse", lambda *_: None)
    with ExitStack() as stack:

        def load(model: Path, degrees: Degrees, **options: Any) -> TorchEngine:
            given = two_nodes()
            agent = agent_of(given, model, degrees=degrees)
            with ThreadPoolExecutor() as threads:
                joining = threads.submit(agent.join, NOT_CANCELLED)
                engine = load_engine(
                    str(model),
                    tensor_parallel_size=degrees.tensor,
                    pipeline_parallel_size=degrees.pipeline,
                    nodes=given,
                    on_plan=lambda _: None,
                    progress=lambda _: None,
                    **options,
                )
                stack.callback(engine.close)
                for rank in joining.result():
                    rank.link.close()
            return engine

        yield load


@pytest.mark.parametrize(
    ("family", "degrees"),
    [("llama", Degrees(4)), ("gemma2", Degrees(4)), ("llama", Degrees(2, pipeline=2))],
)
def test_two_nodes_compute_what_one_rank_does(
    family: Family, degrees: Degrees, tmp_path: Path, load_nodes: Callable[..., TorchEngine]
) -> None:
    path = make_tiny_model(tmp_path, family, **KINDS[family])
    options = {"num_blocks": 64, "block_size": 8, "dtype": "bfloat16"}
    one = load_engine(str(path), on_plan=lambda _: None, **options)
    many = load_nodes(path, degrees, **options)
    logits, wanted = many.logits(batch_of(many)), one.logits(batch_of(one))
    if library() is not None:
        assert torch.equal(logits, wanted)
        prompts = [(5, 9, 200), tuple(range(20))]
        tokens = [token_ids(generate(e, prompts, Sampling(), 9)) for e in (one, many)]
        assert tokens[0] == tokens[1]
        for engine in (one, many):
            engine.kv.copy_blocks((0, 1), (40, 41))
        assert torch.equal(many.logits(batch_of(many)), wanted)
    else:
        assert (logits - wanted).norm() / wanted.norm() < 0.02
    layout = many.spec.layout
    block = KvRange(0, layout.block_size, 0, layout.num_layers)
    if family == "llama":
        with pytest.raises(ValueError, match="in no one memory"):
            many.kv.pack((0,), block, memoryview(bytearray(layout.block_bytes)))


def meet(listening: Nodes, agent: NodeAgent) -> tuple[str, str]:
    """What node 0 and the other node say at their end; empty if they find each other."""
    listener = NodeListener(listening, DEGREES, files_digest(BOX))

    def wait() -> str:
        try:
            listener.wait()
        except StartupError as error:
            return error.message
        return ""

    def join() -> str:
        try:
            ranks = agent.join(NOT_CANCELLED)
        except StartupError as error:
            return error.message
        for each in ranks:
            each.link.close()
        return ""

    with ThreadPoolExecutor() as threads:
        waiting, joining = threads.submit(wait), threads.submit(join)
        try:
            return waiting.result(), joining.result()
        finally:
            listener.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"degrees": Degrees(2)}, "node 1 .* has --tensor-parallel-size 2, node 0 4"),
        (
            {"degrees": replace(DEGREES, cut="sums")},
            "node 1 .* has --tensor-parallel-cut sums, node 0 outputs",
        ),
        ({"size": 4}, "node 1 .* has --nnodes 4, node 0 2; give all nodes the same"),
    ],
)
def test_nodes_with_other_options_are_refused_on_both_sides(
    change: dict[str, Any], told: str
) -> None:
    given = two_nodes()
    theirs = replace(given, size=change.pop("size", 2))
    said = meet(given, agent_of(theirs, **change))
    assert said[0] == said[1]
    assert re.search(told, said[0])


def test_a_node_with_another_checkpoint_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama")
    ours, theirs = meet(given := two_nodes(), agent_of(given, model))
    assert ours == theirs
    assert ours.startswith("node 1 (127.0.0.1), rank 2, has another checkpoint in ")
    assert ours.endswith("give all nodes the same files")


def test_a_node_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json; give a folder"):
        agent_of(two_nodes(), tmp_path).join(NOT_CANCELLED)


def test_a_node_of_another_version_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agent, "__version__", "0.0.1")
    ours, theirs = meet(given := two_nodes(), agent_of(given))
    assert ours == theirs
    assert ours == (
        "rank 2 on node 1 (127.0.0.1) has Baton 0.0.1, node 0 has 0.1.0; install the same on all "
        "nodes"
    )


@pytest.mark.parametrize(("ours", "theirs"), [(b"", b"x"), (b"x", b""), (b"x", b"y")])
def test_a_node_with_another_secret_does_not_join(ours: bytes, theirs: bytes) -> None:
    given = replace(two_nodes(secret=ours), timeout_s=1.0)
    said = meet(given, agent_of(replace(given, secret=theirs)))
    assert "of 2 nodes, 0 are there" in said[0]
    assert "--kv-secret-file" in said[1]


def test_strangers_and_a_missing_node_do_not_hang_node_0() -> None:
    given = replace(two_nodes(), timeout_s=0.5)
    listener = NodeListener(given, DEGREES, "")
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(StartupError, match="of 2 nodes, 0 are there, and 1 not"):
            listener.wait()


def test_silent_strangers_delay_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would hold node 0 for the ten seconds of a greeting."""
    monkeypatch.setattr(node_agent, "run_rank", lambda *_: Mock(pid=os.getpid()))
    monkeypatch.setattr(node_agent, "start_pulse", lambda *_: None)
    given = replace(two_nodes(), timeout_s=30.0)
    listener = NodeListener(given, DEGREES, files_digest(BOX))
    with ExitStack() as strangers, ThreadPoolExecutor() as threads:
        for _ in range(8):
            strangers.enter_context(socket.create_connection(listener.address))
        joining = threads.submit(agent_of(given).join, NOT_CANCELLED)
        assert set(listener.wait()) == {2, 3}
        for each in joining.result():
            each.link.close()
    listener.close()


def test_a_node_0_that_does_not_answer_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is held up by others: its kernel has taken the connection."""
    monkeypatch.setattr(node_agent, "GREETING_S", 0.1)
    monkeypatch.setattr(nodes, "GREETING_S", 0.1)
    given = replace(two_nodes(), timeout_s=0.5)
    with (
        socket.create_server(("127.0.0.1", given.port)),
        pytest.raises(StartupError, match=r"node 1 found no node 0 at .* within 0.5 s"),
    ):
        agent_of(given).join(NOT_CANCELLED)


def test_a_node_that_is_stopped_while_it_waits_says_so() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(StartupError, match="node 1 was stopped while it waited for node 0 at "):
        agent_of(two_nodes()).join(cancelled)


def test_a_stranger_that_goes_on_sending_does_not_hang_node_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "GREETING_S", 0.3)
    listener = NodeListener(replace(two_nodes(), timeout_s=0.5), DEGREES, "")

    def send() -> bool:
        """Send byte by byte; whether node 0 takes 200 of them."""
        with socket.create_connection(listener.address) as stranger:
            try:
                for _ in range(200):
                    stranger.sendall(b"x")
                    NOT_CANCELLED.wait(0.05)
            except OSError:
                return False
        return True

    with ThreadPoolExecutor() as threads:
        sending = threads.submit(send)
        with pytest.raises(StartupError, match="of 2 nodes, 0 are there, and 1 not"):
            listener.wait()
        assert not sending.result()


def test_a_node_that_finds_no_node_0_says_where_it_looked() -> None:
    given = replace(two_nodes(), timeout_s=0.2)
    told = f"node 1 found no node 0 at 127.0.0.1:{given.port} within 0.2 s"
    with pytest.raises(StartupError, match=told):
        agent_of(given).join(NOT_CANCELLED)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"master_port=127.0.0.1:{port}: node 0 cannot .* give a free port"
        ):
            NodeListener(Nodes(2, "127.0.0.1", port), DEGREES, "")


def test_nodes_share_ranks_evenly() -> None:
    Nodes(2).check(DEGREES)
    with pytest.raises(ConfigError, match="nnodes=3: 4 ranks cannot be shared evenly"):
        Nodes(3).check(DEGREES)
    with pytest.raises(ConfigError, match="data_parallel_size=2: its ranks need one host"):
        Nodes(2).check(Degrees(context=2, by_sequence=True))
