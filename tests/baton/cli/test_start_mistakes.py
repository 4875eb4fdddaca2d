"""Mistakes in starting a process, each on the real command: status 2, and one line with option,
value and fix.

Most run in forks of one process; the last two show that a command of its own does the same.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import baton
from tests.support.forked_commands import ForkedCommands

pytestmark = pytest.mark.slow

BATON = str(Path(sys.executable).with_name("baton"))
BOX = Path(__file__).resolve().parents[3] / "models" / "baton-py-6m"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@dataclass(frozen=True)
class Mistake:
    """A command line, with the names of the folders below in {}; what its one line must name; how
    to mend it."""

    command: str
    names: str
    fix: str
    env: tuple[tuple[str, str], ...] = ()


MISTAKES = (
    # What the command line alone tells.
    Mistake("decode", "MODEL", "give one"),
    Mistake("decode {box} --no-such 3", "--no-such", "see baton decode --help"),
    Mistake("serve-all {box}", "'serve-all'", "see baton --help"),
    Mistake("decode {box} --block-size 0", "--block-size=0", "at least 1"),
    Mistake("decode {box} --block-size many", "--block-size=many", "whole number"),
    Mistake("decode {box} --dtype float8", "--dtype=float8", "'bfloat16'"),
    Mistake("decode {box} --device tpu", "--device=tpu", "cuda:N"),
    Mistake(
        "decode {box} --num-gpu-blocks-override 0", "--num-gpu-blocks-override=0", "at least 1"
    ),
    Mistake("decode {box} --kv-cache-memory-bytes 2XB", "--kv-cache-memory-bytes=2XB", "512MiB"),
    Mistake(
        "decode {box} --max-num-batched-tokens 8 --max-num-seqs 9",
        "--max-num-batched-tokens=8",
        "at least 9",
    ),
    Mistake("decode {box} --kv-transport rdma", "--kv-transport=rdma", "'shm'"),
    Mistake("prefill {box} --port 70000", "--port=70000", "at most 65535"),
    Mistake("serve {box} --num-decode-workers 0", "--num-decode-workers=0", "at least 1"),
    Mistake(
        "serve {box} --colocated --num-prefill-workers 2", "--num-prefill-workers", "leave out"
    ),
    Mistake("gateway {box} --decode-workers 127.0.0.1", "'127.0.0.1'", "host:port"),
    Mistake("gateway {box} --decode-workers a:1,a:1", "a:1,a:1", "each address once"),
    Mistake(
        "gateway {box} --decode-workers a:1 --prefill-workers a:1",
        "--decode-workers=a:1",
        "leave it out",
    ),
    Mistake("gateway {box} --registry http://here", "--registry=http://here", "redis://host"),
    # The environment and the file.
    Mistake("decode {box}", "BATON_BLOK_SIZE=8", "BLOCK_SIZE", (("BATON_BLOK_SIZE", "8"),)),
    Mistake(
        "decode {box} --dtype auto",
        "BATON_CPU_LEVEL=avx1024",
        "this machine has",
        (("BATON_CPU_LEVEL", "avx1024"),),
    ),
    Mistake("decode {box} --config {tmp}/unknown.yaml", "unknown.yaml: blok_size=8", "block_size"),
    Mistake("decode {box} --config {tmp}/type.yaml", "type.yaml: port=here", "whole number"),
    Mistake("decode {box} --config {tmp}/broken.yaml", "--config={tmp}/broken.yaml", "valid YAML"),
    Mistake("decode {box} --config {tmp}/no.yaml", "--config={tmp}/no.yaml", "readable file"),
    # The process and its surroundings.
    Mistake("gateway {box} --port {taken}", "--port={taken}", "another port"),
    Mistake("serve {box} --port {taken}", "--port={taken}", "another port"),
    Mistake(
        "gateway {box} --insecure --host no.invalid", "--host=no.invalid", "address of this machine"
    ),
    Mistake("prefill {box} --port {taken}", "--port={taken}", "another port"),
    Mistake(
        "decode {box} --insecure --kv-host 203.0.113.7", "--kv-host=203.0.113.7", "of this machine"
    ),
    Mistake("gateway {box} --host 0.0.0.0", "--host=0.0.0.0", "--insecure"),
    Mistake("decode {box} --kv-host 0.0.0.0", "--kv-host=0.0.0.0", "--kv-secret-file"),
    Mistake(
        "gateway {box} --port 0 --metrics-port {taken}", "--metrics-port={taken}", "a free port"
    ),
    Mistake(
        "gateway {box} --port 0",
        "OTEL_TRACES_EXPORTER=zipkin",
        "use otlp or none",
        (("OTEL_TRACES_EXPORTER", "zipkin"),),
    ),
    Mistake("gateway {box} --ready-fd 91", "--ready-fd=91", "leave it out"),
    Mistake("gateway {box} --parent-fd 92", "--parent-fd=92", "leave it out"),
    # The model's files.
    Mistake("gateway {tmp}/nowhere", "--tokenizer={tmp}/nowhere", "Hub id"),
    Mistake("gateway {empty}", "--tokenizer={empty}", "tokenizer.json"),
    Mistake("gateway some/hub-id", "--tokenizer=some/hub-id", "nor a Hub id"),
    Mistake("prefill some/hub-id", "MODEL=some/hub-id", "check the spelling, the network"),
    Mistake("decode {tmp}/nowhere", "MODEL={tmp}/nowhere", "no such folder"),
    Mistake("decode {empty}", "MODEL={empty}", "no config.json"),
    Mistake("prefill {pickles}", "MODEL={pickles}", "save_pretrained"),
    Mistake("decode {alien}", "MODEL={alien}: model_type='mamba'", "use another checkpoint"),
    Mistake("decode {box} --max-model-len 99999", "--max-model-len=99999", "use 1 to 2048"),
    Mistake(
        "decode {box} --num-gpu-blocks-override 2 --max-model-len 64",
        "--max-model-len=64",
        "lower it",
    ),
    Mistake(
        "decode {box} --kv-cache-memory-bytes 1KiB", "--kv-cache-memory-bytes=1024", "more memory"
    ),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """What the commands' {} stand for: model folders with a fault, a folder of YAML files, a port
    that is taken."""
    tmp = tmp_path_factory.mktemp("mistakes")
    (tmp / "unknown.yaml").write_text("blok_size: 8\n")
    (tmp / "type.yaml").write_text("port: here\n")
    (tmp / "broken.yaml").write_text("port: [1\n")
    for name in ("empty", "pickles", "alien"):
        (tmp / name).mkdir()
    for name in FILES[:3]:
        shutil.copy(BOX / name, tmp / "pickles")
        shutil.copy(BOX / name, tmp / "alien")
    (tmp / "pickles" / "pytorch_model.bin").write_bytes(b"")
    (tmp / "alien" / "model.safetensors").write_bytes(b"")
    (tmp / "alien" / "config.json").write_text('{"model_type": "mamba"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "box": BOX,
            "tmp": tmp,
            "empty": tmp / "empty",
            "pickles": tmp / "pickles",
            "alien": tmp / "alien",
            "taken": taken.getsockname()[1],
        }


def environment(**env: str) -> dict[str, str]:
    """Without the Hub, and without our own variables of this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "BATON_LOG_LEVEL": "warning", **env}


def start(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """The command as users start it."""
    return subprocess.run(
        [BATON, *command], env=environment(**env), check=False, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def commands() -> Iterator[ForkedCommands]:
    with ForkedCommands(environment()) as running:
        yield running


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.command)
def test_a_mistake_is_told_in_one_line(
    mistake: Mistake, places: dict[str, object], commands: ForkedCommands
) -> None:
    command = [part.format(**places) for part in mistake.command.split()]
    done = commands.run(command, environment(**dict(mistake.env)))
    assert done.returncode == 2, done.stderr
    assert done.stdout in ("", f"Baton {baton.__version__} is starting\n")
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("baton")
    assert ": error: " in line
    assert mistake.names.format(**places) in line
    assert mistake.fix in line


def test_a_gpu_that_is_not_there(places: dict[str, object]) -> None:
    done = start(["decode", str(places["box"]), "--device", "cuda"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--device=cuda" in line
    assert "give cpu or auto" in line


def test_serve_tells_once_what_each_child_would_say(places: dict[str, object]) -> None:
    done = start(["serve", str(places["empty"]), "--port", "0"])
    assert done.returncode == 2
    (last,) = done.stderr.splitlines()
    assert last.startswith("baton serve: error: ")
    assert f"MODEL={places['empty']}: no config.json" in last
