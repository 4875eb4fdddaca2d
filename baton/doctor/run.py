"""All checks, in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from baton.doctor import machine
from baton.doctor.finding import Finding, from_json, problem

_ENGINE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Arguments as for `baton serve`. model, registry: empty if none."""

    model: str = ""
    host: str = "127.0.0.1"
    port: int = 50051
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    registry: str = ""


def examine(request: DoctorRequest) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known."""
    yield machine.check_python()
    yield machine.check_packages()
    yield machine.check_address(request.host, request.port)
    yield machine.check_shared_memory()
    yield machine.check_unix_sockets()
    yield machine.check_kv_transports()
    yield machine.check_open_files()
    yield machine.check_clock()
    if request.registry:
        yield machine.check_registry(request.registry)
    yield from examine_engine(request)


def examine_engine(request: DoctorRequest) -> list[Finding]:
    """Check the workers' requirements in a separate process, because they need torch."""
    command = [
        *(sys.executable, "-P", "-m", "engine.doctor"),
        f"--model={request.model}",
        f"--dtype={request.dtype}",
        f"--device={request.device}",
        f"--block-size={request.block_size}",
    ]
    fix = "install torch and the workers' packages: pip install 'baton-serve[worker]'"
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_ENGINE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return [problem("engine", f"no answer in {_ENGINE_TIMEOUT_S:.0f} s", fix)]
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return [problem("engine", last, fix)]
    return [from_json(entry) for entry in json.loads(done.stdout.splitlines()[-1])]
