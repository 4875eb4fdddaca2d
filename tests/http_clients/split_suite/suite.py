"""vLLM's own tests of its split of prefill and decode, against two tiers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.http_clients.scripted_server import wait_for
from tests.http_clients.suite import HERE, Outcomes, Suite, run_pytest
from tests.support.metrics_page import free_ports

ROOT = HERE.parents[1]
MODEL = ROOT / "models" / "baton-py-6m"
NAME = "bundled"
TESTS = HERE / ".vllm"
FOLDER = TESTS / "tests" / "v1" / "kv_connector" / "nixl_integration"


def _run(tests: Sequence[str]) -> Outcomes:
    with _tiers() as ports, tempfile.TemporaryDirectory() as made:
        report = {"REPORT": f"{made}/report.xml", "PYTHONPATH": ""}
        edge = run_pytest("vllm", FOLDER, ["test_edge_cases.py", *tests], {**ports, **report})
        return {**edge, "test_disagg_accuracy::main": _accuracy(ports, Path(made) / "texts")}


def _accuracy(ports: Mapping[str, str], texts: Path) -> str:
    """The script: texts of one process, and then those of the two tiers."""
    python = HERE / ".venv-vllm" / "bin" / "python"
    for mode, port in (("baseline", "PREFILL_PORT"), ("disagg", "PROXY_PORT")):
        url = f"http://127.0.0.1:{ports[port]}"
        options = ["--service_url", url, "--model_name", NAME, "--mode", mode]
        command = [python, FOLDER / "test_disagg_accuracy.py", *options, "--file_name", texts]
        if subprocess.run(command, check=False).returncode:
            return "failed"
    return "passed" if all(json.loads(texts.read_text()).values()) else "failed"


@contextlib.contextmanager
def _tiers() -> Iterator[Mapping[str, str]]:
    """Ports by the names of vLLM's tests: PROXY of a gateway over a prefill and a decode worker,
    DECODE of one over the same decode worker alone, PREFILL of one process that does both."""
    with contextlib.ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secret = made / "secret"
        secret.write_text("of the test" * 3)
        secret.chmod(0o600)

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "baton", *arguments, "--log-level=warning"]
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT))
            stack.callback(process.terminate)
            return process

        kv = ("--kv-cache-memory-bytes=64MiB", f"--kv-secret-file={secret}")
        numbers = free_ports(5)
        for tier, number in zip(("prefill", "decode"), numbers[3:], strict=True):
            options = [f"--port={number}", "--kv-transport=shm", *kv]
            start(tier, str(MODEL), "--served-model-name", NAME, *options)
        prefill, decode = (f"127.0.0.1:{number}" for number in numbers[3:])
        names = ("PROXY_PORT", "DECODE_PORT", "PREFILL_PORT")
        ports = dict(zip(names, map(str, numbers[:3]), strict=True))
        for name, tiers in (
            ("PROXY_PORT", [f"--prefill-workers={prefill}", f"--decode-workers={decode}"]),
            ("DECODE_PORT", [f"--decode-workers={decode}"]),
        ):
            options = [*tiers, "--port=0", f"--http-port={ports[name]}"]
            gateway = start("gateway", str(MODEL), "--served-model-name", NAME, *options)
            wait_for(f"http://127.0.0.1:{ports[name]}/health", gateway)
        options = ["--colocated", "--port=0", f"--http-port={ports['PREFILL_PORT']}", kv[0]]
        whole = start("serve", str(MODEL), "--served-model-name", NAME, *options)
        wait_for(f"http://127.0.0.1:{ports['PREFILL_PORT']}/health", whole)
        yield ports


SPLIT = Suite(
    name="split",
    title="vLLM's tests of its own split",
    about=(
        "`test_edge_cases.py` and `test_disagg_accuracy.py` of vLLM 0.33.0's "
        "tests of its NIXL connector, unmodified: the proxy is a gateway over a "
        "prefill and a decode worker, the decode port a gateway over the same decode worker alone, "
        "the prefill port one process that does both; the bundled model, in processes."
    ),
    run=_run,
    not_run=(
        "The folder's other tests count accepted drafts, compare accuracies on GSM8K or read "
        "vLLM's own connectors."
    ),
)
