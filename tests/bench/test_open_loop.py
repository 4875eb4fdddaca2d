"""`python -m bench.peers.open_loop`: equal bounds for all, servers that end early, its table."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.drive_http import drive_http
from bench.machine import describe_machine
from bench.measure import Record, Slo
from bench.peers import llama_server, processes
from bench.peers.models import PeerMissing
from bench.peers.open_loop import baton_options, runs_data
from bench.peers.processes import ContenderFailed
from bench.peers.server import Bounds, PeerServer, running
from bench.peers.vllm_server import vllm_server
from bench.slo_servers import Load
from bench.suite.served_table import AGAIN, TWICE, served_table
from bench.workload import LoadRequest
from tests.support.canned_http import answering

BOUNDS = Bounds(num_threads=2, max_model_len=1088, max_num_seqs=16, kv_bytes=1 << 30)
SLO = Slo(ttft_ms=500, tpot_ms=100)
#: Both end 2 s after the first is due; one meets the targets.
EARLY = Record(0.0, 0.0, 2.0, 8, ((0.1, 1), (0.2, 1)))
LATE = Record(0.0, 0.0, 2.0, 8, ((1.9, 1), (2.0, 1)))


def server(*lines: str) -> PeerServer:
    return PeerServer([sys.executable, "-uc", "\n".join(lines)], {}, 1, "it is up")


def document(missing: dict[str, str], **records: list[Record]) -> dict[str, Any]:
    names = {"split": TWICE, "again": AGAIN, "colocated": "baton, colocated", "vllm": "vllm"}
    found = {(names[name], 1.0): kept for name, kept in records.items()}
    return {
        "machine": describe_machine(),
        "versions": {},
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["python"],
        "model": "125m",
        "slo": asdict(SLO),
        "load": asdict(Load(2, 1, 0.3)),
        "bounds": asdict(BOUNDS),
        "runs": runs_data(found, SLO),
        "missing": missing,
    }


def test_each_shape_of_baton_has_the_same_bounds() -> None:
    for each in baton_options("models/baton-py-6m", BOUNDS).values():
        num_workers = each.num_decode_workers + (0 if each.colocated else each.num_prefill_workers)
        assert num_workers * (each.kv_cache_memory_bytes or 0) == BOUNDS.kv_bytes
        assert (each.max_model_len, each.max_num_seqs) == (1088, 16)


def test_vllm_has_these_bounds_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_PEERS", tmp_path)
    with pytest.raises(PeerMissing, match="WITH_VLLM=1"):
        vllm_server("box", 512, BOUNDS, 8000)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    made = vllm_server("box", 512, BOUNDS, 8000)
    options = dict(zip(made.command[3:-1], made.command[4:], strict=True))
    assert options["--max-num-batched-tokens"] == "512"
    assert options["--max-model-len"] == "1088"
    assert options["--max-num-seqs"] == "16"
    assert made.environment == {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}


def test_llama_cpp_has_them_for_each_of_its_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llama_server, "peers_python", lambda: tmp_path / "python")
    monkeypatch.setattr(llama_server, "gguf_file", lambda model, dtype: f"{model}-{dtype}")
    with pytest.raises(PeerMissing, match="WITH_LLAMA_SERVER=1"):
        llama_server.llama_server("box", 128, BOUNDS, 8000)
    (tmp_path / "llama-server").touch()
    made = llama_server.llama_server("box", 128, BOUNDS, 8000)
    options = list(made.command)
    for option, value in {"model": "box-bfloat16", "ctx-size": "17408", "parallel": "16"}.items():
        assert options[options.index(f"--{option}") + 1] == value


async def test_its_own_door_streams_tokens_and_ends_by_its_last_event() -> None:
    """In chunks: their lengths are no events."""
    pieces = [([7], False), ([8, 9], False), ([], True)]
    events = [
        b"data: " + json.dumps({"tokens": tokens, "stop": stop}).encode() + b"\n\n"
        for tokens, stop in pieces
    ]
    chunks = [b"%x\r\n" % len(event) + event + b"\r\n" for event in events]
    requests = (LoadRequest(0.0, (1, 2, 3), 3), LoadRequest(0.0, (4,), 3))
    # The second answer breaks off before its last event.
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    async with answering(lambda number: head + b"".join(chunks[: 3 - number])) as asked:
        records = await drive_http(asked.address, requests, "salt", llama_server.DIALECT)
    assert sorted(record.num_output_tokens for record in records) == [3, 3]
    assert sorted(record.error for record in records) == ["", "BROKEN"]
    assert {head.split()[1] for head in asked.heads} == {b"/completion"}
    assert {body["n_predict"] for body in asked.bodies} == {3}


async def test_a_server_is_there_from_its_mark_on_and_ends_with_what_it_started() -> None:
    """Its log has ended when the block ends: the child that holds it too is gone then."""
    program = server(
        "import subprocess, sys, time",
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        "print('soon, it is up')",
        "print('word ' * 100_000)",
        "time.sleep(600)",
    )
    async with asyncio.timeout(60), running(program) as address:
        assert address == "127.0.0.1:1"


@pytest.mark.parametrize(
    ("program", "told"), [("print('no memory'); print()", "no memory"), ("", "without a word")]
)
async def test_a_server_that_ends_early_is_told_with_its_last_words(
    program: str, told: str
) -> None:
    with pytest.raises(ContenderFailed, match=told):
        async with asyncio.timeout(60), running(server(program)):
            pass


def test_goodput_is_of_answers_inside_both_targets() -> None:
    (run,) = runs_data({("vllm", 2.0): [EARLY, LATE]}, SLO)
    assert run["goodput_per_s"] == pytest.approx(0.5)
    assert (run["contender"], run["rate"]) == ("vllm", 2.0)


def test_the_better_shape_is_compared_with_the_peer_and_a_server_with_itself() -> None:
    shown = served_table(
        document(
            {"vllm, chunks of 512": "it is not installed"},
            split=[LATE, LATE],
            again=[EARLY, LATE],
            colocated=[EARLY, EARLY],
            vllm=[EARLY, LATE],
        )
    )
    assert "1 requests/s 2.00 times (met)" in shown
    assert "differ by up to 0.50 answers/s" in shown
    assert "* vllm, chunks of 512 has no figures: it is not installed." in shown
    assert len([line for line in shown.splitlines() if line.startswith("| 1 |")]) == 4


def test_without_a_peer_there_is_no_comparison() -> None:
    shown = served_table(document({}, split=[EARLY], again=[EARLY]))
    assert "Goal: goodput 1.2 times the best peer's: not measured." in shown
