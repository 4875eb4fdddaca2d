"""The start and the end of `baton serve` with a model: what its processes import, and what they
leave on the terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from baton.client import Client

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL = "models/baton-py-6m"

#: What no process on a CPU needs: seconds of imports, or complaints at the end.
UNWANTED = (
    "transformers",
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "torch.distributed.tensor",
)

#: Runs a tier as `python -m TIER`, and writes down its modules as it ends.
SPY = """
import atexit, json, os, runpy, sys
from pathlib import Path
tier = sys.argv.pop(1)
folder = Path(os.environ["SPY_FOLDER"])
atexit.register(lambda: (folder / f"{tier}.json").write_text(json.dumps(sorted(sys.modules))))
runpy.run_module(tier, run_name="__main__", alter_sys=True)
"""

SERVE = """
import sys
from baton.config import ServeOptions
from baton.service import run_service
from baton.supervisor import Cluster, Programs
import baton.supervisor.serve as serve
spied = lambda tier: (sys.executable, "-P", sys.argv[1], tier)
programs = Programs(spied("prefill_svc"), spied("decode_svc"), spied("gateway"))
serve.Cluster = lambda options, **told: Cluster(options, programs=programs, **told)
options = ServeOptions(model=sys.argv[2], port=0, kv_cache_memory_bytes="64MiB")
sys.exit(run_service(options, serve.serve_cluster, "serve"))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], str, list[str]]:
    """Modules of each tier after two answers, one of them handed over; stderr of the whole; stdout
    by lines."""
    folder = tmp_path_factory.mktemp("spied")
    spy = folder / "spy.py"
    spy.write_text(SPY)
    with (folder / "log").open("w+") as log:
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, str(spy), MODEL],
            cwd=ROOT,
            env={**os.environ, "SPY_FOLDER": str(folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process:
            lines: list[str] = []
            for line in process.stdout or ():
                lines.append(line)
                if line.startswith("  or:  curl "):
                    break
            ready = next((line for line in lines if line.startswith("Baton is ready at ")), None)
            if ready is None:
                process.wait()
                pytest.fail(f"{lines} {(folder / 'log').read_text()}")
            with Client(ready.removeprefix("Baton is ready at ").split(": ")[0]) as client:
                short = client.generate("def f", max_tokens=3)
                long = client.generate("def f(x): return x\n" * 20, max_tokens=3)
            assert short.usage.completion_tokens
            _ask_over_http(lines[-1])
            assert long.timing.prefill_worker == "prefill-0"
            process.send_signal(signal.SIGINT)
            process.wait()
        log.seek(0)
        told = log.read()
    tiers = ("prefill_svc", "decode_svc", "gateway")
    modules = {tier: json.loads((folder / f"{tier}.json").read_text()) for tier in tiers}
    return modules, told, lines


def _ask_over_http(example: str) -> None:
    """By the unmodified openai package, at the address of the command that the start shows."""
    found = re.search(r"http://[^/]+/v1", example)
    assert found, example
    with openai.OpenAI(base_url=found[0], api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt="def f", max_tokens=8, temperature=0)
        pieces = client.completions.create(
            model=model, prompt="def f", max_tokens=8, temperature=0, stream=True
        )
        assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
        assert whole.usage
        assert whole.usage.completion_tokens == 8


Served = tuple[dict[str, list[str]], str, list[str]]


@pytest.mark.parametrize("tier", ["prefill_svc", "decode_svc", "gateway"])
def test_no_process_imports_what_it_does_not_need(served: Served, tier: str) -> None:
    modules = served[0][tier]
    assert ("torch" in modules) == (tier != "gateway")
    assert not set(modules).intersection(UNWANTED)


def test_no_library_complains_at_the_stop(served: Served) -> None:
    log = served[1]
    assert "finishing what runs" in log
    assert not [line for line in log.splitlines() if not line.startswith("{")]


def test_each_process_tells_its_phases_and_the_ready_line_what_was_chosen(served: Served) -> None:
    lines = served[2]
    phases = [line.split(" s  ")[1].split(maxsplit=1) for line in lines if " s  " in line]
    for name in ("prefill-0", "decode-0"):
        own = [phase.strip() for child, phase in phases if child == name]
        assert own == ["importing", "importing torch", "loading weights", "ready"]
    (ready,) = (line for line in lines if line.startswith("Baton is ready at "))
    (example,) = (line for line in lines if line.startswith("  try: "))
    assert f"{MODEL}; bfloat16 (the checkpoint's type)" in ready
    assert ready.endswith("; 1 prefill + 1 decode + 1 gateway\n")
    assert example.startswith("  try: baton generate ")
