"""Processes start together, stop in order, come back when they die, and never outlive their
supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError, StartupError
from baton.numa import NumaNode
from baton.supervisor import ChildFailed, Cluster
from baton.supervisor.cluster import restart_delay_s

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Stage


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that nobody has waited for yet has
    ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids_in(journal: list[str]) -> list[int]:
    return [int(line.split()[2]) for line in journal if " started " in line]


async def has_ended(pid: int) -> None:
    """Returns when the process, which may be no child of ours, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def test_all_start_each_phase_is_told_and_the_gateway_stops_first(stage: Stage) -> None:
    async with stage.cluster(num_prefill_workers=2, num_decode_workers=2) as cluster:
        assert set(cluster.names) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "gateway"}
        assert len({cluster.address_of(name) for name in cluster.names}) == len(cluster.names)
        assert cluster.address == cluster.address_of("gateway")
        pids = [cluster.pid_of(name) for name in cluster.names]
        assert all(map(is_running, pids))
        phases = dict(cluster.phases)
    assert {"prefill-0", "decode-0", "gateway", "serving", "total"} <= set(phases)
    assert phases["decode-0 load"] == 0.25
    assert phases["total"] >= phases["decode-0"] > 0
    journal = stage.journal()
    stops = [line for line in journal if line.endswith("stopped")]
    assert stops[0] == "gateway stopped"
    assert sorted(stops[1:]) == [
        f"{tier}-{index} stopped" for tier in ("decode", "prefill") for index in (0, 1)
    ]
    assert not any(map(is_running, pids))


async def test_the_gateway_starts_beside_the_workers_and_is_given_their_addresses(
    stage: Stage,
) -> None:
    """A worker that is not ready before a gateway has started waits for ever where gateways come
    last."""
    stage.misbehave("decode-0", "after gateway")
    phases: list[tuple[str, str]] = []
    cluster = stage.cluster()
    cluster._on_phase = lambda name, phase: phases.append((name, phase))
    async with cluster:
        wanted = [
            f"{tier} {cluster.address_of(f'{tier.lower()}-0')}" for tier in ("PREFILL", "DECODE")
        ]
        heard = [line for line in stage.journal() if line.startswith("gateway heard ")]
        assert sorted(heard) == sorted(f"gateway heard {line}" for line in wanted)
        os.kill(cluster.pid_of("gateway"), signal.SIGKILL)
        async with asyncio.timeout(60):
            while len(heard) < 4:  # the one that is started instead hears them again
                await asyncio.sleep(0)
                heard = [line for line in stage.journal() if line.startswith("gateway heard ")]
        assert sorted(heard) == sorted(2 * [f"gateway heard {line}" for line in wanted])
    for name in ("prefill-0", "decode-0", "gateway"):
        own = [phase for child, phase in phases if child == name]
        assert own[:3] == ["importing", "listening", "ready"]


async def test_several_gateways_share_one_port_and_stop_before_the_workers(stage: Stage) -> None:
    async with stage.cluster(num_gateways=3) as cluster:
        gateways = ["gateway", "gateway-1", "gateway-2"]
        assert cluster.names == ("prefill-0", "decode-0", *gateways)
        assert {cluster.address_of(name) for name in gateways} == {cluster.address}
        assert len({cluster.pid_of(name) for name in gateways}) == 3
    stops = [line for line in stage.journal() if line.endswith("stopped")]
    assert stops[:3] == ["gateway stopped"] * 3
    assert sorted(stops[3:]) == ["decode-0 stopped", "prefill-0 stopped"]


async def test_gateways_share_their_port_with_no_stranger(stage: Stage) -> None:
    """One that shares ports too would get a part of the requests without a word."""
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: is in use"):
            async with stage.cluster(num_gateways=2, port=port):
                pytest.fail("it started")
    assert stage.journal() == []


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("decode-0", "refuse", "decode-0 did not start (refused): no such weights"),
        pytest.param(
            *("decode-0", "refuse and stay", "decode-0 did not start (refused): no such weights"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("prefill-0", "crash", "prefill-0 did not start (exit status 3): the last words"),
            marks=pytest.mark.long,
        ),
        ("gateway", "crash", "gateway did not start (exit status 3): the last words"),
    ],
)
async def test_a_child_that_cannot_start_is_named_with_its_cause_and_the_rest_is_stopped(
    stage: Stage, name: str, how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "refuse and stay":
        monkeypatch.setattr("baton.supervisor.child._EXIT_S", 0.1)
    stage.misbehave(name, how)
    with pytest.raises(ChildFailed) as caught:
        async with stage.cluster():
            pytest.fail("it started")
    assert caught.value.message == told
    assert f"{name} was here" in caught.value.last_lines
    assert not any(map(is_running, pids_in(stage.journal())))


@pytest.mark.parametrize(
    ("refused", "by"),
    [
        ("one", "decode"),
        ("two", "gateway"),
        pytest.param("one", "gateway", marks=pytest.mark.long),
        pytest.param("two", "decode", marks=pytest.mark.long),
    ],
)
async def test_a_model_that_is_refused_leaves_the_others_running(
    stage: Stage, refused: str, by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own workers end; those of the other model are not started twice."""
    numbers = {"one": 0, "two": 1}
    folder = tmp_path / "two"
    folder.mkdir()
    if by == "gateway":
        stage.misbehave("gateway", f"refuse {refused}")
    else:
        place = stage.folder if refused == "one" else folder
        (place / f"decode-{numbers[refused]}").write_text("refuse")
    options = {"served_model_name": "one", "more_models": f"two={folder}", "num_gateways": 2}
    async with stage.cluster(**options) as cluster:
        (other,) = numbers.keys() - {refused}
        kept = {f"{tier}-{numbers[other]}" for tier in ("prefill", "decode")}
        assert set(cluster.names) == {*kept, "gateway", "gateway-1"}
        assert cluster.refused_models == (refused,)
        places = {"one": stage, "two": type(stage)(folder)}
        journal = stage.journal()
        of_other = places[other].journal()
        assert sum(line.startswith(f"prefill-{numbers[other]} started") for line in of_other) == 1
        assert [line for line in journal if line.startswith("gateway of ")][-2:] == [
            f"gateway of {other}"
        ] * 2
        heard = [line.split()[-1] for line in journal if line.startswith("gateway heard ")]
        assert set(heard[-4:]) == {cluster.address_of(name) for name in kept}
        assert not any(map(is_running, pids_in(places[refused].journal()))) or refused == "one"
    what = "no tokenizer" if by == "gateway" else "no such weights"
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    child = "gateway" if by == "gateway" else f"decode-{numbers[refused]}"
    assert line == f"serving without model {refused}: {child} did not start (refused): {what}"


async def test_nothing_is_served_if_all_models_are_refused(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    stage.misbehave("decode-0", "refuse")
    (folder / "prefill-1").write_text("refuse")
    with pytest.raises(ChildFailed, match=r"did not start \(refused\): no such weights"):
        async with stage.cluster(served_model_name="one", more_models=f"two={folder}"):
            pytest.fail("it started")
    assert not any(map(is_running, pids_in(stage.journal())))


async def test_a_child_that_ends_while_the_gateway_is_awaited_fails_the_start(stage: Stage) -> None:
    cluster = stage.cluster()

    async def never(_address: str) -> None:
        os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
        await asyncio.Event().wait()

    cluster._wait_serving = never
    with pytest.raises(ChildFailed, match=r"decode-0 did not start \(killed by SIGKILL\)"):
        async with cluster:
            pytest.fail("it started")


async def test_a_gateway_that_never_serves_fails_the_start(stage: Stage) -> None:
    cluster = stage.cluster()

    async def gives_up(_address: str) -> None:
        raise StartupError("nobody to serve with")

    cluster._wait_serving = gives_up
    with pytest.raises(StartupError, match="nobody to serve with"):
        async with cluster:
            pytest.fail("it started")
    assert not any(map(is_running, pids_in(stage.journal())))


async def test_a_child_that_dies_later_comes_back_on_its_port(stage: Stage) -> None:
    async with stage.cluster() as cluster:
        pid, address = cluster.pid_of("decode-0"), cluster.address_of("decode-0")
        back = asyncio.Event()

        def on_line(name: str, line: str) -> None:
            if name == "decode-0" and "ready at" in line:
                back.set()

        stage.on_line = on_line
        os.kill(pid, signal.SIGKILL)
        await back.wait()
        assert cluster.pid_of("decode-0") != pid
        assert f"ready at {address} " in dict(stage.lines)["decode-0"]
    assert cluster.address_of("decode-0") == address


async def test_a_deaf_child_is_killed_after_its_grace(stage: Stage) -> None:
    stage.misbehave("decode-0", "deaf")
    async with stage.cluster() as cluster:
        pid = cluster.pid_of("decode-0")
        await cluster._children["decode-0"].stop(grace_s=0.01)
        assert not is_running(pid)


async def test_stopping_during_the_start_leaves_no_process(stage: Stage) -> None:
    stage.misbehave("decode-0", "hang")
    cluster = stage.cluster()
    here = asyncio.Event()
    stage.on_line = lambda name, _line: here.set() if name == "decode-0" else None
    starting = asyncio.create_task(cluster.start())
    await here.wait()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    pid = cluster.pid_of("decode-0")
    await cluster.stop()
    assert not is_running(pid)


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import Stage
from baton.service import run_service
from baton.config import ServeOptions
import baton.supervisor.serve as serve
from conftest import FAKES, serves_at_once
from baton.supervisor import Cluster
serve.Cluster = lambda options, **told: Cluster(
    options, programs=FAKES, wait_serving=serves_at_once, **told
)
options = ServeOptions(model={folder!r}, port=0)
sys.exit(run_service(options, serve.serve_cluster, "serve"))
"""


async def start_supervisor(stage: Stage) -> tuple[asyncio.subprocess.Process, bytes]:
    """`baton serve` with fakes, in a process of its own, and its ready line (or nothing if it did
    not get there).

    What it writes before, and the two lines below the ready line, are lost.
    """
    script = SUPERVISOR.format(tests=str(Path(__file__).parent), folder=str(stage.folder))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if process.stdout is None:
        pytest.fail("no pipe")
    while (line := await process.stdout.readline()) and not line.startswith(b"Baton is ready"):
        assert b" s  " in line, line
    for _ in range(2 if line else 0):
        line += await process.stdout.readline()
    return process, line


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
async def test_serve_tells_that_it_is_ready_and_drains_on_a_signal(
    stage: Stage, signum: signal.Signals
) -> None:
    process, line = await start_supervisor(stage)
    assert line.startswith(b"Baton is ready at 127.0.0.1:")
    assert b"; 1 prefill + 1 decode + 1 gateway\n" in line
    assert b"  try: baton generate " in line
    assert b" s (load 0.2 s), decode-0 " in line
    process.send_signal(signum)
    rest, log = await process.communicate()
    assert process.returncode == 0, log
    assert rest == b""
    stops = [line for line in stage.journal() if line.endswith("stopped")]
    assert stops[0] == "gateway stopped"
    assert not any(map(is_running, pids_in(stage.journal())))


async def test_serve_reports_the_cause_once_and_exits_with_2(stage: Stage) -> None:
    for name in ("prefill-0", "decode-0"):
        stage.misbehave(name, "refuse")
    process, line = await start_supervisor(stage)
    _, log = await process.communicate()
    assert line == b""
    assert process.returncode == 2
    (cause,) = (line.decode() for line in log.splitlines() if b"no such weights" in line)
    assert cause in {
        f"baton serve: error: {name} did not start (refused): no such weights"
        for name in ("prefill-0", "decode-0")
    }
    assert log.splitlines()[-1].decode() == cause
    assert b"Traceback" not in log


async def test_no_child_outlives_a_supervisor_that_is_killed(stage: Stage) -> None:
    process, _ = await start_supervisor(stage)
    pids = pids_in(stage.journal())
    assert len(pids) == 3
    process.kill()
    for pid in pids:
        await has_ended(pid)
    await process.communicate()


def test_a_cluster_that_never_started_has_no_address(stage: Stage) -> None:
    cluster: Cluster = stage.cluster()
    with pytest.raises(KeyError):
        _ = cluster.address


def test_a_process_that_served_is_restarted_soon_and_one_that_cannot_start_less_and_less() -> None:
    delays = list(accumulate([0.0] * 12, restart_delay_s))
    assert delays[1:4] == [0.5, 1.0, 2.0]
    assert delays[-1] == delays[-2] == 30.0
    for last_s in delays:
        assert restart_delay_s(last_s, served_s=10.0) == 0.5


async def test_workers_are_kept_to_the_nodes_of_the_host(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Made-up ones, with a core each for a worker of each tier."""
    nodes = [NumaNode(number, frozenset({number})) for number in (0, 1)]
    monkeypatch.setattr("baton.supervisor.cluster.usable_nodes", lambda _cores: nodes)
    caplog.set_level("INFO", "baton.supervisor.cluster")
    async with stage.cluster(num_threads=1) as cluster:
        specs = [cluster._children[name].spec for name in ("prefill-0", "decode-0", "gateway")]
    options = [[a for a in spec.arguments if a.startswith("--numa-node")] for spec in specs]
    assert options == [["--numa-node=0"], ["--numa-node=1"], []]
    (line,) = (text for text in caplog.messages if "NUMA" in text)
    assert "node 1 (1 cores): decode-0" in line
