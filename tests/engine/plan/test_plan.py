"""Whole plans of config files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.config.load import build_options
from baton.config.plan_options import PlanOptions
from baton.errors import ConfigError, ModelError
from engine.plan.degrees import candidates
from engine.plan.devices import DEVICES, THIS_CPU, HostCosts, find_device
from engine.plan.goodput import Split
from engine.plan.plan import Plan, Planner, find_or_measure
from engine.plan.report import as_json, print_plan
from engine.plan.source import read_model
from engine.ranks.mesh import Degrees
from tests.support.planned import CONFIGS, LLAMA_8B, sizes_of

pytestmark = pytest.mark.slow

Planning = Callable[..., Plan]


@pytest.fixture
def plan(tmp_path: Path) -> Planning:
    """The plan of a config with options of `baton plan`."""

    def run(raw: Mapping[str, Any], **options: object) -> Plan:
        path = tmp_path / "some.json"
        path.write_text(json.dumps(raw))
        given = build_options(PlanOptions, {"model": str(path), **options})
        device = find_device(given.gpu)
        model = read_model(given, "cuda", has_float8=device.has_float8)
        return Planner(given, model, device).plan()

    return run


@pytest.mark.parametrize("gpu", sorted(DEVICES))
def test_no_shape_takes_more_than_the_device_has(plan: Planning, gpu: str) -> None:
    found = plan(LLAMA_8B, gpu=gpu, gpus=4)
    assert found.shapes
    for shape in found.shapes:
        assert found.num_devices == shape.num_workers * shape.degrees.num_ranks
        for stage in shape.stages:
            used = stage.weight_bytes + stage.reserved.total + stage.kv_bytes
            assert used == found.available_bytes <= found.device.memory_bytes
            assert stage.kv_bytes > 0
        users = list(shape.users.values())
        assert users == sorted(users, reverse=True)


def test_more_devices_never_hold_fewer_users(plan: Planning) -> None:
    found = plan(LLAMA_8B, gpus=4)
    users = {shape.degrees: shape.users["4K"] for shape in found.shapes}
    assert users[Degrees(1)] < users[Degrees(2)] < users[Degrees(4)]
    assert users[Degrees(1)] < users[Degrees(1, 2)] < users[Degrees(1, 4)]


def test_a_power_of_two_may_leave_devices_idle(
    plan: Planning, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(LLAMA_8B, gpus=6)
    workers = {shape.degrees: shape.num_workers for shape in found.shapes}
    assert workers[Degrees(4)] == 1
    assert workers[Degrees(2)] == 3
    assert Degrees(1, 5) not in workers
    print_plan(found)
    assert "1, 2 idle" in capsys.readouterr().out


def test_experts_are_shared_both_ways(plan: Planning) -> None:
    found = plan(CONFIGS["qwen3_moe"], gpus=2)
    assert Degrees(2, whole_experts=True) in [shape.degrees for shape in found.shapes]


def test_a_model_that_is_too_large_says_how_many_devices_hold_it(plan: Planning) -> None:
    large = {**LLAMA_8B, "num_hidden_layers": 120, "hidden_size": 8192}
    with pytest.raises(ConfigError) as caught:
        plan(large, gpu="l40s")
    number = int(caught.value.message.partition("use at least ")[2].split()[0])
    assert caught.value.metadata["option"] == "gpus"
    assert plan(large, gpu="l40s", gpus=number).shapes
    with pytest.raises(ConfigError, match=f"use at least {number} "):
        plan(large, gpu="l40s", gpus=number - 1)


def test_a_model_that_no_number_of_devices_holds_is_refused_at_once(
    plan: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's activations alone are more than one has: no shape is tried."""
    tried = []
    monkeypatch.setattr(
        "engine.plan.plan.candidates", lambda num: tried.append(num) or candidates(num)
    )
    with pytest.raises(ConfigError, match=r"use a larger --gpu or smaller weights"):
        plan(LLAMA_8B, gpu="l4", max_num_batched_tokens=1 << 20)
    assert tried == [1]


def test_a_plan_follows_the_rotary_scaling(plan: Planning) -> None:
    plain = plan(LLAMA_8B)
    scaled = plan(LLAMA_8B, rope_scaling='{"rope_type": "linear", "factor": 4.0}')
    assert scaled.max_len == 4 * plain.max_len
    with pytest.raises(ModelError, match="rope_type='curly'"):
        plan(LLAMA_8B, rope_scaling='{"rope_type": "curly"}')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 3, "tensor_parallel_size": 3}, "num_heads=32 is no multiple of it"),
        ({"gpus": 64, "pipeline_parallel_size": 64}, "pipeline_parallel_size=64: .* 32 layers"),
        ({"gpus": 6, "tensor_parallel_size": 8}, "gpus=6: a worker takes 8 devices"),
        ({"gpu": "h900"}, "gpu=h900: use one of b200"),
        ({"trace": "/none.csv"}, "trace=/none.csv: give a readable trace"),
        ({"gpu": "a100", "kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8: .* use int8"),
    ],
)
def test_bad_values_are_named_with_their_fix(
    plan: Planning, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(LLAMA_8B, **options)


def test_a_model_that_is_not_here_is_refused(tmp_path: Path) -> None:
    given = build_options(PlanOptions, {"model": str(tmp_path / "none" / "config.json")})
    with pytest.raises(ModelError, match=r"neither a folder, a config\.json nor a Hub id"):
        read_model(given, "cuda", has_float8=True)


def test_the_split_follows_a_trace(plan: Planning, tmp_path: Path) -> None:
    splits = []
    for num_input, num_output in ((8000, 10), (200, 800)):
        path = tmp_path / f"{num_input}.jsonl"
        entry = {"input_length": num_input, "output_length": num_output}
        lines = [json.dumps({**entry, "timestamp": 500 * number}) for number in range(200)]
        path.write_text("\n".join(lines))
        splits.append(plan(LLAMA_8B, gpus=8, trace=path).split)
    prompts, answers = splits
    assert isinstance(prompts, Split)
    assert isinstance(answers, Split)
    assert prompts.prefill.num_workers * prompts.prefill.degrees.num_ranks > 4
    assert answers.decode.num_workers * answers.decode.degrees.num_ranks > 4


def test_one_plan_in_three_forms(
    plan: Planning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from engine.plan.picture import draw

    found = plan(CONFIGS["deepseek_v3"], gpus=4)
    print_plan(found)
    text = capsys.readouterr().out
    assert "latent" in text
    assert "Best split" in text
    document = json.loads(json.dumps(as_json(found)))
    assert document["shapes"][0]["degrees"] == {
        "tensor": 1,
        "pipeline": 1,
        "context": 1,
        "whole_experts": False,
        "by_sequence": False,
        "cut": "outputs",
    }
    assert document["device"]["flops_per_s"]["fp8"] == 1979e12
    draw(found, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"picture=.*give a path that can be written"):
        draw(found, tmp_path / "none" / "plan.png")


@pytest.mark.parametrize(("gpus", "tensor", "measured"), [(2, None, [1, 2]), (3, 3, [1, 2])])
def test_more_ranks_than_cores_take_exchanges_as_so_many_as_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, tensor: int | None, measured: list[int]
) -> None:
    """Not none, as one rank takes."""
    ranks: list[int] = []

    def measure_hosts(asked: list[int], dtype: str) -> Mapping[int, HostCosts]:
        del dtype
        ranks.extend(asked)
        return {num: HostCosts(exchange_s=num - 1.0) for num in asked}

    monkeypatch.setattr("engine.plan.host_costs.measure_hosts", measure_hosts)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    options = build_options(
        PlanOptions,
        {"model": "m", "gpu": THIS_CPU, "gpus": gpus, "tensor_parallel_size": tensor},
    )
    device = find_or_measure(options, sizes_of(CONFIGS["llama"]))
    assert ranks == measured
    assert device.host(gpus).exchange_s == 1.0
