"""`python -m bench.load` from the command line to its files, on real processes with the oracle
engine."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.drive import apart_options, cluster_options
from bench.load import app, settings_of
from tests.support.fake_inference import FakeInference, serve


async def load(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr."""
    command = (sys.executable, "-m", "bench.load", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
@pytest.mark.long
async def test_split_and_colocated_are_compared_on_one_trace(tmp_path: Path) -> None:
    trace, told_path, plot_path = (tmp_path / name for name in ("t.jsonl", "t.json", "t.png"))
    entries = [
        {"timestamp": 20 * i, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 10 + i]}
        for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, entries)))
    status, out, err = await load(
        "--compare",
        *("--set", "engine=oracle", "--set", "block_size=8"),
        *("--trace", str(trace), "--input-scale", "0.0625", "--repeat", "2"),
        *("--ttft-slo-ms", "60000", "--tpot-slo-ms", "60000"),
        *("--json", str(told_path), "--plot", str(plot_path)),
    )
    assert status == 0, err
    assert "goodput of split" in out
    assert "goodput of colocated" in out
    told: dict[str, Any] = json.loads(told_path.read_text())
    assert [point["target"] for point in told["points"]] == [
        "split",
        "colocated",
        "colocated",
        "split",
    ]
    for point in told["points"]:
        summary = point["summary"]
        assert (summary["num_complete"], summary["num_requests"], summary["errors"]) == (6, 6, {})
        assert summary["num_output_tokens"] == 36
        assert summary["num_prompt_tokens"] == 6 * round(1500 * 0.0625)
        assert (summary["num_handed_over"] > 0) is (point["target"] == "split")
        assert point["rate"] == pytest.approx(50)
    assert told["targets"]["colocated"]["num_decode_workers"] == 2
    assert told["machine"]["num_cores"] > 0
    assert "grpcio" in told["versions"]
    assert told["options"]["load"]["trace"] == str(trace)
    assert plot_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
async def test_a_gateway_that_runs_already_is_measured_and_left_running(tmp_path: Path) -> None:
    told_path = tmp_path / "t.json"
    fake = FakeInference()
    server = await serve(fake)
    flags = ("--rate", "200", "--num-requests", "5", "--arrivals", "burst", "--burst-size", "2")
    try:
        status, out, err = await load("--address", server.address, *flags, "--json", str(told_path))
        assert status == 0, err
        status, _, _ = await load("--address", server.address, *flags)
        assert status == 0
    finally:
        await server.stop()
    assert "5/5" in out
    (point,) = json.loads(told_path.read_text())["points"]
    assert point["target"] == "given"
    generated = [request for request in fake.requests if hasattr(request, "prompt")]
    salts = [request.cache_salt for request in generated]
    # Warming up, then a run of its own salt, twice.
    assert [salts.count(salt) for salt in dict.fromkeys(salts)] == [6, 5, 5]
    assert all(token < 99 for request in generated for token in request.prompt.token_ids.ids)


@pytest.mark.slow
async def test_a_gateway_that_is_not_there_is_told_in_one_line() -> None:
    status, _, err = await load("--address", "127.0.0.1:1", "--rate", "1")
    assert status == 1
    assert "load: gateway not reachable at 127.0.0.1:1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--rate"),
        (("--rate", "0"), "more than 0"),
        (("--rate", "1", "--compare", "--address", "h:1"), "leave out --address"),
        (("--rate", "1", "--set", "dtype=float32", "--address", "h:1"), "leave out --address"),
        (("--rate", "1", "--arrivals", "trace"), "--trace FILE"),
        (("--rate", "1", "--input-scale", "0"), "scales"),
        (("--rate", "1", "--set", "dtype"), "NAME=VALUE"),
        (("--rate", "1", "--set", "no_such=1"), "no such option"),
        (("--rate", "1", "--set", "block_size=0"), "--block-size"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: tuple[str, ...], told: str
) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code not in (0, None)
    assert told in result.output


def test_both_targets_have_as_many_workers_and_the_same_engine() -> None:
    settings = settings_of(["num-prefill-workers=2", "num_decode_workers=3", "dtype=float32"])
    told = cluster_options("m", settings, compares=True)
    split, colocated = told["split"], told["colocated"]
    assert split.num_prefill_workers + split.num_decode_workers == colocated.num_decode_workers == 5
    assert (split.colocated, colocated.colocated) == (False, True)
    assert split.dtype == colocated.dtype == "float32"
    assert list(cluster_options("m", {"colocated": True}, compares=False)) == ["colocated"]
    (apart,) = apart_options("m", settings).values()
    assert apart == split.model_copy(update={"max_local_prefill_tokens": 16})
