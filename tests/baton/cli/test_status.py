"""`baton status`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from baton.client import Model, NumericsClass, SamplingParams, TierLoad, WorkerStatus
from baton.errors import NoWorkers

if TYPE_CHECKING:
    from conftest import FakeClient

Run = Callable[..., Any]


def worker(tier: str, state: str = "ready", reason: str = "") -> WorkerStatus:
    return WorkerStatus(
        worker_id=f"{tier}-0",
        address="127.0.0.1:5",
        tier=tier,
        state=state,
        reason=reason,
        num_running=1,
        num_waiting=2,
        num_free_blocks=70,
        num_cached_blocks=10,
        num_leased_blocks=20,
        num_blocks=100,
        block_size=16,
        num_in_flight=3,
        local_prefill_threshold=48,
    )


def model(*workers: WorkerStatus) -> Model:
    return Model("m[bold]", 2048, 512, has_chat_template=True, workers=workers)


def test_a_worker_is_a_line_where_no_terminal_is(
    run: Run, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However narrow the last terminal was, and long what there is to tell."""
    monkeypatch.setenv("COLUMNS", "40")
    told = "a long reason of many words that any terminal folds" * 3
    stalled = replace(worker("decode", "stalled", told), address="127.0.0.1:5")
    client.served = (model(worker("prefill"), stalled),)
    lines = run("status").stdout.splitlines()
    (line,) = (line for line in lines if "decode-0" in line)
    assert "127.0.0.1:5" in line
    assert told in line


def test_tiers_of_kv_have_a_line_each(run: Run, client: FakeClient) -> None:
    host = TierLoad("host", "", True, 3 << 20, 5, 2, 1, 1500.0, 100.0)
    disk = TierLoad("disk", "a write failed: it is full")
    store = TierLoad("store")
    client.served = (model(replace(worker("decode"), kv_tiers=(host, disk, store))),)
    text = run("status").stdout
    assert (
        "decode-0 host: on; 3 MiB; 5 blocks hit, 2 missed; 1 evicted; 1.5 s saved, 0.1 s lost"
        in text
    )
    assert "decode-0 disk: off: a write failed: it is full; 0 MiB" in text
    assert "decode-0 store: not used: computing is faster; 0 MiB" in text


def test_a_table_of_workers(run: Run, client: FakeClient) -> None:
    client.served = (model(worker("prefill"), worker("decode")),)
    result = run("status")
    assert result.exit_code == 0
    assert "m[bold]: 2048 tokens" in result.stdout
    lines = result.stdout.splitlines()
    (line,) = (line for line in lines if "decode-0" in line)
    assert line.split() == [
        "decode-0",
        "127.0.0.1:5",
        "decode",
        "ready",
        "1",
        "2",
        "3",
        "20/100",
        "10",
        "48",
    ]


def test_slots_of_windowed_layers_are_shown_where_a_worker_has_them(
    run: Run, client: FakeClient
) -> None:
    client.served = (model(worker("prefill"), worker("decode")),)
    assert "windows" not in run("status").stdout
    slotted = replace(worker("decode"), num_leased_window_slots=12, num_window_slots=96)
    client.served = (model(worker("prefill"), slotted),)
    lines = run("status").stdout.splitlines()
    (heading,) = (line for line in lines if "cached" in line)
    (line,) = (line for line in lines if "decode-0" in line)
    assert heading.split()[-1] == "windows"
    assert line.split()[-1] == "12/96"


def test_the_models_own_sampling_defaults_are_shown(run: Run, client: FakeClient) -> None:
    defaults = SamplingParams(temperature=0.7, top_k=20)
    client.served = (replace(model(worker("decode")), sampling_defaults=defaults),)
    assert "sampling defaults of the model: temperature 0.7, top_k 20\n" in run("status").stdout


def test_json_has_every_field(run: Run, client: FakeClient) -> None:
    client.served = (model(worker("decode")),)
    (told,) = json.loads(run("status", "--json").stdout)
    assert told["workers"][0]["num_free_blocks"] == 70


@pytest.mark.parametrize(
    "workers", [(), (worker("prefill"),), (worker("decode", "stalled", "no heartbeat"),)]
)
def test_no_ready_decode_worker_is_exit_status_1(
    workers: tuple[WorkerStatus, ...], run: Run, client: FakeClient
) -> None:
    client.served = (model(*workers),)
    assert run("status").exit_code == 1


def test_a_gateway_that_is_not_there(run: Run, client: FakeClient) -> None:
    client.fault = NoWorkers("gateway not reachable at 127.0.0.1:50051")
    result = run("status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not reachable" in result.stderr


def test_numerics_classes_are_shown_and_their_mix_is_told(run: Run, client: FakeClient) -> None:
    cpu = NumericsClass("cpu", "avx512", "bfloat16", "1")
    prefill = replace(worker("prefill"), numerics=cpu)
    client.served = (model(prefill, replace(worker("decode"), numerics=cpu)),)
    told = run("status").stdout
    assert "numerics class: cpu avx512 bfloat16 1\n" in told
    assert "BATON_CPU_LEVEL" not in told
    client.served = (
        model(prefill, replace(worker("decode"), numerics=replace(cpu, level="avx2"))),
    )
    told = run("status").stdout
    assert "numerics class: cpu avx512 bfloat16 1 (prefill-0)" in told
    assert "numerics class: cpu avx2 bfloat16 1 (decode-0)" in told
    assert "2 numerics classes" in told


def test_workers_without_native_kernels_are_told(run: Run, client: FakeClient) -> None:
    slow = NumericsClass("cpu", "none", "bfloat16", "1")
    client.served = (model(replace(worker("decode"), numerics=slow)),)
    assert "decode-0: no native CPU kernels" in run("status").stdout
