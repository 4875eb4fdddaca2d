"""The load tools that people use, unmodified, against `baton serve`: each ends with 0, and none
of its requests fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http_clients.conftest import MODEL, Run, runner

pytestmark = pytest.mark.slow

NUM_REQUESTS = 8
#: For aiperf, which reads tokenizers from Hugging Face's cache alone when it is offline.
HUB_NAME = "baton/bundled"


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    hub = tmp_path_factory.mktemp("hub")
    cached = hub / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "snapshots").mkdir()
    revision = "0" * 40
    (cached / "refs" / "main").write_text(revision)
    (cached / "snapshots" / revision).symlink_to(model)
    return runner("load", hub)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(run: Run, base_url: str, model: Path, tmp_path: Path, endpoint: str) -> None:
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={base_url},model={MODEL},request_format={endpoint}",
        "--profile=kind=concurrent,streams=2",
        f"--constraint=kind=max_requests,count={NUM_REQUESTS}",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        f"--tokenizer=kind=hf_auto,model={model}",
        f"--output=kind=json,path={report}",
        "--disable-console",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)


@pytest.mark.parametrize("endpoint_type", ["completions", "chat"])
def test_aiperf(run: Run, base_url: str, tmp_path: Path, endpoint_type: str) -> None:
    run(
        "aiperf",
        "profile",
        f"--model={MODEL}",
        f"--url={base_url}",
        f"--endpoint-type={endpoint_type}",
        "--streaming",
        f"--tokenizer={HUB_NAME}",
        "--isl=32",
        "--osl=8",
        "--concurrency=2",
        f"--request-count={NUM_REQUESTS}",
        "--no-gpu-telemetry",
        "--ui=none",
        f"--artifact-dir={tmp_path}",
    )
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report["error_summary"]


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(
    run: Run, base_url: str, model: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    run(
        "vllm",
        "bench",
        "serve",
        f"--backend={backend}",
        f"--base-url={base_url}",
        f"--endpoint={endpoint}",
        f"--model={MODEL}",
        f"--tokenizer={model}",
        "--dataset-name=random",
        "--random-input-len=32",
        "--random-output-len=8",
        "--ignore-eos",
        f"--num-prompts={NUM_REQUESTS}",
        "--max-concurrency=2",
        "--save-result",
        f"--result-dir={tmp_path}",
        "--result-filename=report.json",
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0)
    assert report["total_output_tokens"] == NUM_REQUESTS * 8
