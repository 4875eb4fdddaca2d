"""What `baton serve` passes on to each process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.config import GatewayOptions, ServeOptions
from baton.config.load import build_options
from baton.config.named_models import named_model
from baton.errors import ConfigError
from baton.supervisor.cluster import child_environment
from baton.supervisor.plan import (
    ChildSpec,
    describe_gpus,
    gpus_of_workers,
    num_ranks,
    num_visible_gpus,
    plan_gateways,
    plan_workers,
)
from baton_kernels.cpu.library import LEVEL_VARIABLE

RANKS = st.integers(1, 4)


def number(spec: ChildSpec, option: str) -> int:
    (value,) = (a.partition("=")[2] for a in spec.arguments if a.startswith(f"--{option}="))
    return int(value)


@given(
    num_prefill=st.integers(1, 8),
    num_decode=st.integers(1, 8),
    ranks=st.tuples(RANKS, RANKS),
    num_cores=st.integers(1, 256),
)
def test_ranks_share_the_cores(
    num_prefill: int, num_decode: int, ranks: tuple[int, int], num_cores: int
) -> None:
    options = ServeOptions(
        model="m",
        num_prefill_workers=num_prefill,
        num_decode_workers=num_decode,
        tensor_parallel_size=ranks[0],
        decode_tensor_parallel_size=ranks[1],
    )
    specs = plan_workers(options, num_cores)
    sizes = [number(spec, "tensor-parallel-size") for spec in specs]
    assert sizes == [ranks[0]] * num_prefill + [ranks[1]] * num_decode
    threads = [number(spec, "num-threads") for spec in specs]
    per_rank = threads[0] // ranks[0]
    assert threads == [per_rank * size for size in sizes]
    assert per_rank == 1 or sum(threads) <= num_cores
    assert sum(threads) + sum(sizes) > num_cores


def test_each_tier_has_its_degrees() -> None:
    options = ServeOptions(
        model="m",
        tensor_parallel_size=2,
        prefill_pipeline_parallel_size=3,
        context_parallel_size=4,
        enable_expert_parallel=True,
        distributed_backend="gloo",
    )
    prefill, decode = plan_workers(options, 52)
    assert num_ranks(options) == (24, 2)
    names = [f"{name}-parallel-size" for name in ("tensor", "pipeline", "context")]
    assert [number(prefill, name) for name in names] == [2, 3, 4]
    assert [number(decode, name) for name in names[:2]] == [2, 1]
    assert not any("context" in argument for argument in decode.arguments)
    assert [number(spec, "num-threads") for spec in (prefill, decode)] == [48, 4]
    for spec in (prefill, decode):
        assert {"--enable-expert-parallel", "--distributed-backend=gloo"} <= {*spec.arguments}


def test_ranks_with_sequences_of_their_own_are_in_either_tier() -> None:
    options = ServeOptions(model="m", data_parallel_size=3)
    assert num_ranks(options) == (3, 3)
    for spec in plan_workers(options, 6):
        assert number(spec, "data-parallel-size") == 3


def test_each_model_has_workers_of_its_own() -> None:
    options = ServeOptions(
        model="a",
        metrics_port=9000,
        more_models=("b=org/b:num_decode_workers=2:decode_block_size=32:reasoning_parser=none",),
    )
    workers = plan_workers(options, num_cores=10)
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [spec.name for spec in workers] == names
    models = ["a", "org/b", "a", "org/b", "org/b"]
    assert [spec.arguments[-1] for spec in workers] == models
    served = ["--served-model-name=b" in spec.arguments for spec in workers]
    assert served == [model != "a" for model in models]
    assert [number(spec, "block-size") for spec in workers] == [16, 16, 16, 32, 32]
    assert [number(spec, "num-threads") for spec in workers] == [2] * 5
    (gateway,) = plan_gateways(options)
    assert "--more-models=b=org/b:reasoning_parser=none" in gateway.arguments
    ports = [number(spec, "metrics-port") for spec in (gateway, *workers)]
    assert ports == list(range(9000, 9006))


def test_models_share_the_devices() -> None:
    options = ServeOptions(model="a", more_models=("b=b", "c=c:device=cpu"))
    (*prefill, on_cpu), decode = gpus_of_workers(options, 2)
    assert (prefill, on_cpu, decode) == ([0, 1], None, (1, 0, None))
    shares = [
        float(argument.partition("=")[2])
        for spec in plan_workers(options, 8, num_gpus=2)
        for argument in spec.arguments
        if argument.startswith("--gpu-memory-utilization=")
    ]
    assert shares == [0.4] * 6


def test_the_users_number_of_threads_stands() -> None:
    specs = plan_workers(ServeOptions(model="m", num_threads=7), 2)
    assert [number(spec, "num-threads") for spec in specs] == [7, 7]


def test_each_worker_has_its_name_and_its_tiers_block_size() -> None:
    options = ServeOptions(
        model="m", num_prefill_workers=2, block_size=8, decode_block_size=32, dtype="float32"
    )
    specs = plan_workers(options, 4)
    assert [spec.name for spec in specs] == ["prefill-0", "prefill-1", "decode-0"]
    for spec in specs:
        size = 32 if spec.name == "decode-0" else 8
        assert {f"--worker-id={spec.name}", f"--block-size={size}", "--port=0"} <= {*spec.arguments}
        assert "--dtype=float32" in spec.arguments
        assert spec.arguments[-2:] == ("--", "m")


def test_workers_write_no_files_of_each_other() -> None:
    options = ServeOptions(
        model="m",
        num_prefill_workers=2,
        enable_expert_parallel=True,
        expert_load_file=Path("loads/of.json"),
        kv_disk_dir="kv",
        kv_disk_bytes=1 << 30,
    )
    for spec in plan_workers(options, 4):
        own = {f"--expert-load-file=loads/of-{spec.name}.json", f"--kv-disk-dir=kv/{spec.name}"}
        assert own <= {*spec.arguments}


def test_options_of_one_role_go_to_that_role_alone() -> None:
    options = ServeOptions(model="m", max_local_prefill_tokens=3, max_queue_size=9, port=1234)
    prefill, decode = plan_workers(options, 2)
    (gateway,) = plan_gateways(options)
    roles = {"prefill": prefill, "decode": decode, "gateway": gateway}
    for argument, role in {
        "--max-local-prefill-tokens=3": "decode",
        "--max-queue-size=9": "gateway",
        "--port=1234": "gateway",
        "--workers-fd=0": "gateway",
    }.items():
        assert [name for name, spec in roles.items() if argument in spec.arguments] == [role]


def test_colocated_has_no_prefill_workers() -> None:
    options = ServeOptions(model="m", colocated=True, num_decode_workers=2)
    specs = plan_workers(options, 4)
    assert [spec.name for spec in specs] == ["decode-0", "decode-1"]
    assert all("--colocated" in spec.arguments for spec in specs)


def test_several_gateways_differ_in_name_only_and_share_the_port() -> None:
    first, *others = plan_gateways(ServeOptions(model="m", num_gateways=3))
    assert [first.name, *(spec.name for spec in others)] == ["gateway", "gateway-1", "gateway-2"]
    assert all(spec.arguments == first.arguments for spec in others)
    assert "--reuse-port" in first.arguments
    (only,) = plan_gateways(ServeOptions(model="m"))
    assert "--reuse-port" not in only.arguments


def test_one_of_the_gateways_of_a_supervisor_plans() -> None:
    options = ServeOptions(model="m", num_gateways=3, planner="on", slo_ttft_ms=500)
    gateways = plan_gateways(options)
    plans = [gateway.name for gateway in gateways if "--planner=on" in gateway.arguments]
    assert plans == ["gateway"], "they have no lease"


def test_each_model_has_its_own_greatest_number_of_workers() -> None:
    options = ServeOptions(
        model="a",
        served_model_name="one",
        more_models=("two=b:max_workers=5:num_decode_workers=2", "three=c"),
        planner="on",
        slo_ttft_ms=500,
        max_workers=3,
        num_gateways=2,
    )
    workers = plan_workers(options, 11)
    later = defaultdict(list)
    for spec in workers:
        later[spec.model].append(spec.starts_later)
    assert later == {
        "one": [False, False, True],
        "two": [False, False, False, True, True],
        "three": [False, False, True],
    }
    assert {number(spec, "num-threads") for spec in workers} == {1}, "a core for each of eleven"
    for spec in plan_gateways(options):
        more = [a.partition("=")[2] for a in spec.arguments if a.startswith("--more-models=")]
        plans = "--planner=on" in spec.arguments
        # Bounds without a planner would be refused.
        assert [named_model(each).options for each in more] == [
            {"max_workers": "5"} if plans else {},
            {},
        ]
        assert ("--max-workers=3" in spec.arguments) == plans


def test_a_model_does_not_start_with_more_workers_than_it_may_have() -> None:
    with pytest.raises(ValidationError, match=r"two=b.*max-workers=3: is less than the 4 workers"):
        ServeOptions(
            model="a",
            more_models=("two=b:max_workers=3:num_decode_workers=3",),
            planner="on",
            slo_ttft_ms=500,
            max_workers=9,
        )


def test_a_restart_takes_the_port_of_the_first_start() -> None:
    (_, decode) = plan_workers(ServeOptions(model="m"), 2)
    ports = [
        part for part in decode.at_ports({"port": 4711}).arguments if part.startswith("--port")
    ]
    assert ports == ["--port=4711"]


def test_children_get_flags_in_place_of_our_variables() -> None:
    """A variable that was refused or overruled here must not come back in a child."""
    inherited = child_environment({"PATH": "/bin", "BATON_BLOCK_SIZE": "8"})
    assert inherited["PATH"] == "/bin"
    assert "BATON_BLOCK_SIZE" not in inherited


def test_children_run_at_the_level_that_was_forced() -> None:
    """It is no option, so that no flag has it."""
    assert child_environment({LEVEL_VARIABLE: "avx2"})[LEVEL_VARIABLE] == "avx2"


def share(spec: ChildSpec) -> float:
    prefix = "--gpu-memory-utilization="
    (value,) = (a.removeprefix(prefix) for a in spec.arguments if a.startswith(prefix))
    return float(value)


@given(
    num_prefill=st.integers(1, 8),
    num_decode=st.integers(1, 8),
    total=st.floats(0.1, 1.0),
    of_prefill=st.none() | st.floats(0.01, 0.09),
)
def test_workers_share_the_memory(
    num_prefill: int, num_decode: int, total: float, of_prefill: float | None
) -> None:
    options = ServeOptions(
        model="m",
        num_prefill_workers=num_prefill,
        num_decode_workers=num_decode,
        gpu_memory_utilization=total,
        prefill_gpu_memory_utilization=of_prefill,
    )
    shares = [share(spec) for spec in plan_workers(options, 1)]
    assert abs(sum(shares) - total) < 1e-9
    if of_prefill is None:
        assert len(set(shares)) == 1
    else:
        assert abs(sum(shares[:num_prefill]) - of_prefill) < 1e-9
        assert len(set(shares[num_prefill:])) == 1


def test_workers_share_a_secret_that_no_command_line_shows() -> None:
    def secrets_of(**options: Any) -> list[str | None]:
        specs = plan_workers(ServeOptions(model="m", **options), 2, kv_secret="f" * 64)
        assert not any("f" * 64 in part for spec in specs for part in spec.arguments)
        return [spec.environment.get("BATON_KV_SECRET") for spec in specs]

    assert secrets_of() == ["f" * 64] * 2
    # The user's own goes before it.
    assert secrets_of(kv_secret_file="/s") == [None] * 2
    assert secrets_of(kv_secret="g" * 64) == ["g" * 64] * 2


def places(specs: Sequence[ChildSpec]) -> list[str]:
    """The device of each."""
    return [
        argument.removeprefix("--device=")
        for spec in specs
        for argument in spec.arguments
        if argument.startswith("--device=")
    ]


@pytest.mark.parametrize(
    ("options", "num_gpus", "expected"),
    [
        ({}, 0, []),
        ({}, 1, []),
        ({}, 2, ["cuda:0", "cuda:1"]),
        ({"num_prefill_workers": 2, "num_decode_workers": 3}, 4, [0, 1, 2, 3, 0]),
        ({"device": "cpu"}, 2, ["cpu", "cpu"]),
        ({"device": "cuda:1"}, 2, ["cuda:1", "cuda:1"]),
        ({"prefill_devices": (0, 1), "decode_devices": (2, 3)}, 4, [0, 1, 2, 3]),
        ({"prefill_devices": (3,)}, 4, [3, 0]),
        ({"decode_devices": (0,), "num_decode_workers": 2}, 1, [0, 0, 0]),
        ({"decode_devices": (1, 0)}, 0, [1, 1, 0]),
        ({"decode_devices": (1, 0), "colocated": True}, 2, [1, 0]),
        ({"prefill_tensor_parallel_size": 2, "num_prefill_workers": 2}, 5, [0, 2, 4]),
        ({"tensor_parallel_size": 2, "device": "cpu"}, 2, ["cpu", "cpu"]),
        (
            {"tensor_parallel_size": 2, "prefill_devices": (0,), "decode_devices": (2, 4)},
            6,
            [0, 2, 4],
        ),
        ({"prefill_tensor_parallel_size": 2, "prefill_devices": (1,)}, 3, [1, 0]),
    ],
)
def test_workers_are_placed_on_gpus(
    options: dict[str, Any], num_gpus: int, expected: list[str | int]
) -> None:
    given_options = ServeOptions(model="m", **options)
    wanted = [f"cuda:{gpu}" if isinstance(gpu, int) else gpu for gpu in expected]
    assert places(plan_workers(given_options, 8, num_gpus=num_gpus)) == wanted
    numbers = [place.removeprefix("cuda:") for place in wanted if "device" not in options]
    line = describe_gpus(given_options, num_gpus)
    assert [part.split()[-1] for part in line.split(", ") if part] == numbers


@given(
    prefill=st.lists(st.integers(0, 3), max_size=6),
    decode=st.lists(st.integers(0, 3), max_size=6),
    of_prefill=st.none() | st.floats(0.01, 0.5),
)
def test_workers_share_the_memory_of_their_gpu(
    prefill: list[int], decode: list[int], of_prefill: float | None
) -> None:
    options = ServeOptions(
        model="m",
        prefill_devices=tuple(prefill),
        decode_devices=tuple(decode),
        prefill_gpu_memory_utilization=of_prefill,
    )
    specs = plan_workers(options, 8, num_gpus=4)
    totals: defaultdict[str, float] = defaultdict(float)
    for spec, place in zip(specs, places(specs), strict=True):
        totals[place] += share(spec)
    assert all(total == pytest.approx(options.gpu_memory_utilization) for total in totals.values())


def test_each_rank_has_a_gpu_of_its_own() -> None:
    options = ServeOptions(model="m", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"device=auto: the workers have 4 ranks, .* 3 GPUs are"):
        plan_workers(options, 8, num_gpus=3)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_gpus", "problem"),
    [
        ((0,), (1,), 4, "prefill_devices=0: .* GPU 1 would have 2 ranks"),
        ((0,), (1,), 0, "prefill_devices=0: .* GPU 1 would have 2 ranks"),
        ((0, 1), (3,), 5, "prefill_devices=0,1: .* GPU 1 would have 2 ranks"),
        ((0,), (), 4, "prefill_devices=0: .* GPU 1 would have 2 ranks"),
        ((), (3,), 4, "decode_devices=3: .* GPU 4 is not here"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_beside_named_ones(
    prefill: tuple[int, ...], decode: tuple[int, ...], num_gpus: int, problem: str
) -> None:
    options = ServeOptions(
        model="m", tensor_parallel_size=2, prefill_devices=prefill, decode_devices=decode
    )
    with pytest.raises(ConfigError, match=problem):
        plan_workers(options, 8, num_gpus=num_gpus)


def test_a_gpu_that_is_not_here_is_refused() -> None:
    options = ServeOptions(model="m", decode_devices=(0, 4))
    with pytest.raises(ConfigError, match=r"decode_devices.*use 0 to 3"):
        plan_workers(options, 8, num_gpus=4)
    with pytest.raises(ConfigError, match="--decode-devices"):
        build_options(ServeOptions, {"model": "m", "device": "cpu", "decode_devices": (0,)})


def test_gpus_are_counted(tmp_path: Path) -> None:
    assert num_visible_gpus({}, tmp_path / "none") == 0
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert num_visible_gpus({}, tmp_path) == 2
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert num_visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, tmp_path) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServeOptions(model="m", num_gateways=2, response_store_bytes=1),
        lambda: GatewayOptions(model="m", reuse_port=True, response_store_bytes=1),
    ],
)
def test_kept_answers_are_those_of_one_gateway(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="each keeps its own answers"):
        make()
