"""Where option values come from, which source wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.config import (
    DecodeOptions,
    GatewayOptions,
    Options,
    PrefillOptions,
    ServeOptions,
    load_options,
)
from baton.config.command import to_arguments
from baton.errors import ConfigError
from baton.types import Slo

COMMANDS = (DecodeOptions, GatewayOptions, PrefillOptions, ServeOptions)
SIZES = st.none() | st.integers(1, 256)


@given(flag=SIZES, variable=SIZES, file=SIZES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flags_go_before_environment_before_file_before_default(
    flag: int | None, variable: int | None, file: int | None, tmp_path: Path
) -> None:
    """Whatever is given, the value is the first given one's, of the sources in this order."""
    path = tmp_path / "options.yaml"
    path.write_text("" if file is None else f"block-size: {file}\n")
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv("BATON_BLOCK_SIZE", str(variable))
        flags = {"model": "m"} | ({} if flag is None else {"block_size": str(flag)})
        options = load_options(DecodeOptions, flags, path)
    expected = next(size for size in (flag, variable, file, 16) if size is not None)
    assert options.block_size == expected


def test_constructing_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_BLOCK_SIZE", "8")
    assert DecodeOptions(model="m").block_size == 16


@pytest.mark.parametrize("cls", COMMANDS)
def test_options_are_frozen_and_closed(cls: type[Options]) -> None:
    options = load_options(cls, {"model": "m"})
    with pytest.raises(ValidationError):
        options.log_level = "debug"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no such option"):
        load_options(cls, {"model": "m", "modle": "n"})


#: (what is given, how the option is spelled in the refusal, what the refusal asks for)
REFUSED = [
    ({"block_size": "0"}, "--block-size=0", "at least 1"),
    ({"block_size": "257"}, "--block-size=257", "at most 256"),
    ({"block_size": "many"}, "--block-size=many", "whole number"),
    ({"block_size": "1.5"}, "--block-size=1.5", "whole number"),
    ({"block_size": True}, "--block-size=True", "other than true or false"),
    ({"dtype": "int3"}, "--dtype=int3", "'bfloat16'"),
    ({"device": "tpu"}, "--device=tpu", "cuda:N"),
    ({"engine": "steam"}, "--engine=steam", "'oracle'"),
    ({"engine": "oracle", "kv_cache_dtype": "int8"}, "--kv-cache-dtype=int8", "keeps hashes"),
    ({"expert_load_file": "f"}, "--expert-load-file=f", "--enable-expert-parallel"),
    ({"port": "65536"}, "--port=65536", "at most 65535"),
    ({"port": "-1"}, "--port=-1", "at least 0"),
    ({"host": ""}, "--host=", "not empty"),
    ({"max_model_len": "1"}, "--max-model-len=1", "at least 2"),
    ({"max_num_seqs": "0"}, "--max-num-seqs=0", "at least 1"),
    ({"kv_cache_memory_bytes": "2 spoons"}, "--kv-cache-memory-bytes=2 spoons", "512MiB"),
    ({"kv_cache_memory_bytes": "0MB"}, "--kv-cache-memory-bytes=0MB", "at least 1"),
    ({"ticket_lease_s": "0"}, "--ticket-lease-s=0", "more than 0"),
    ({"ticket_lease_s": "inf"}, "--ticket-lease-s=inf", "number"),
    ({"drain_timeout_s": "nan"}, "--drain-timeout-s=nan", "number"),
    ({"enable_prefix_caching": "perhaps"}, "--enable-prefix-caching=perhaps", "true or false"),
    (
        {"async_scheduling": True, "speculative_method": "ngram"},
        "--async-scheduling",
        "--speculative-method none",
    ),
    ({"blocksize": "4"}, "--blocksize=4", "did you mean block_size?"),
    ({"model": ""}, "MODEL=", "not empty"),
]


def test_a_class_of_requests_has_the_deployments_targets_where_it_has_none_of_its_own() -> None:
    classes = "interactive=300:25.5,batch=30000:,steady=:20"
    options = load_options(
        GatewayOptions,
        {"model": "m", "slo_ttft_ms": 1000, "slo_tpot_ms": 50, "slo_classes": classes},
    )
    assert options.slo_by_class == {
        "interactive": Slo(0.3, 0.0255),
        "batch": Slo(30.0, 0.05),
        "steady": Slo(1.0, 0.02),
    }


@pytest.mark.parametrize(
    ("classes", "fix"),
    [
        ("interactive", "NAME=TTFT_MS:TPOT_MS"),
        ("interactive=300", "NAME=TTFT_MS:TPOT_MS"),
        ("interactive=:", "one of the two"),
        ("interactive=0:0", "one of the two"),
        ("interactive=-1:3", "one of the two"),
        ("inter active=300:", "one of the two"),
        ("a=300:,a=400:", "each name once"),
        ("a=300:", "give --slo-ttft-ms"),
        ("a=:30", "give --slo-tpot-ms"),
    ],
)
def test_a_wrong_class_of_requests_is_refused(classes: str, fix: str) -> None:
    with pytest.raises(ConfigError, match="--slo-classes") as caught:
        load_options(GatewayOptions, {"model": "m", "slo_classes": classes})
    assert fix in caught.value.message


@pytest.mark.parametrize(("given_", "spelled", "fix"), REFUSED, ids=str)
def test_a_wrong_value_is_refused_with_option_value_and_fix(
    given_: dict[str, object], spelled: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_options(DecodeOptions, {"model": "m"} | given_)
    assert caught.value.message.startswith(spelled + ": ")
    assert fix in caught.value.message
    assert "\n" not in caught.value.message


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="MODEL is missing"):
        load_options(PrefillOptions, {})


def test_a_refusal_names_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_PORT", "x")
    with pytest.raises(ConfigError, match="BATON_PORT=x"):
        load_options(GatewayOptions, {"model": "m"})
    monkeypatch.delenv("BATON_PORT")
    path = tmp_path / "options.yaml"
    path.write_text("port: x\n")
    with pytest.raises(ConfigError, match=r"options.yaml: port=x"):
        load_options(GatewayOptions, {"model": "m"}, path)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_BLOK_SIZE", "8")
    with pytest.raises(ConfigError, match="did you mean BLOCK_SIZE"):
        load_options(GatewayOptions, {"model": "m"})


def test_a_variable_of_another_command_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment may serve all processes of a machine."""
    monkeypatch.setenv("BATON_NUM_DECODE_WORKERS", "3")
    monkeypatch.setenv("BATON_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("BATON_CPU_LEVEL", "avx2")
    assert load_options(GatewayOptions, {"model": "m"}).port == 50051


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- list\n",
        "block_size: [1\n",
        "1: 2\n",
        "block_size: 4\nblock-size: 8\n",
        "nonsense: 1\n",
        "!!python/object/apply:os.getcwd []\n",
    ],
)
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_options(DecodeOptions, {"model": "m"}, path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a readable file"):
        load_options(DecodeOptions, {"model": "m"}, tmp_path / "none.yaml")


def test_addresses_come_repeated_or_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PREFILL_WORKERS", "a:1, b:2")
    flags = {"model": "m", "decode_workers": ["c:3,d:4", "[::1]:5"]}
    options = load_options(GatewayOptions, flags)
    assert options.prefill_workers == ("a:1", "b:2")
    assert options.decode_workers == ("c:3", "d:4", "[::1]:5")


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:0", "a:65536", "a:x", "::1:5", "a:1,a:1"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--decode-workers"):
        load_options(GatewayOptions, {"model": "m", "decode_workers": [address]})


def test_options_without_meaning_are_refused() -> None:
    flags = {"model": "m", "colocated": True}
    assert load_options(ServeOptions, flags).colocated
    with pytest.raises(ConfigError, match="leave out --num-prefill-workers"):
        load_options(ServeOptions, flags | {"num_prefill_workers": 2})
    with pytest.raises(ConfigError, match="leave out --prefill-gpu-memory-utilization"):
        load_options(ServeOptions, flags | {"prefill_gpu_memory_utilization": 0.1})
    with pytest.raises(ConfigError, match="leave out --context-parallel-size"):
        load_options(ServeOptions, flags | {"context_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"--context-parallel-size=2: --engine=oracle has no"):
        load_options(ServeOptions, {"model": "m", "engine": "oracle", "context_parallel_size": 2})
    own = {"model": "m", "data_parallel_size": 2}
    assert load_options(ServeOptions, own | {"expert_load_file": "load.json"}).data_parallel_size
    for other, value in (
        *(("tensor_parallel_size", 2), ("pipeline_parallel_size", 2)),
        *(("context_parallel_size", 2), ("kv_per_rank", True)),
        *(("prefill_tensor_parallel_size", 2), ("decode_pipeline_parallel_size", 2)),
    ):
        told = f"--data-parallel-size=2: .* without --{other.replace('_', '-')}; leave one"
        with pytest.raises(ConfigError, match=told):
            load_options(ServeOptions, own | {other: value})
    with pytest.raises(ConfigError, match=r"--data-parallel-size=2: .* --enable-expert-parallel"):
        load_options(ServeOptions, own | {"enable_expert_parallel": True})
    with pytest.raises(ConfigError, match=r"--data-parallel-size=2: --engine=oracle has no"):
        load_options(ServeOptions, own | {"engine": "oracle"})


def test_the_prefill_tier_leaves_memory_to_the_decode_tier() -> None:
    flags = {"model": "m", "gpu_memory_utilization": 0.5}
    assert load_options(ServeOptions, flags | {"prefill_gpu_memory_utilization": 0.4})
    with pytest.raises(ConfigError, match=r"0\.5: leaves nothing of --gpu-memory-utilization=0\.5"):
        load_options(ServeOptions, flags | {"prefill_gpu_memory_utilization": 0.5})


def test_how_many_new_tokens_a_captured_step_has() -> None:
    def most(**flags: object) -> int | None:
        return load_options(DecodeOptions, {"model": "m", **flags}).max_graph_tokens

    assert most(max_num_seqs=40) == 40
    assert most(max_num_seqs=1000, max_num_batched_tokens=1000) == 512
    assert most(max_num_seqs=40, max_cudagraph_capture_size=16) == 16
    # Each sequence may verify its drafts in one step.
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 3}
    assert most(max_num_seqs=40, **drafts) == 160
    assert most(max_num_seqs=40, max_cudagraph_capture_size=16, **drafts) == 16
    assert most(max_num_seqs=40, speculative_method="mtp") == 40
    assert most(enforce_eager=True) is None
    with pytest.raises(ConfigError, match="with --enforce-eager nothing is captured"):
        most(enforce_eager=True, max_cudagraph_capture_size=16)


def test_names_fall_back_to_what_is_known() -> None:
    assert DecodeOptions(model="org/name").model_name == "org/name"
    assert DecodeOptions(model="org/name", served_model_name="x").model_name == "x"
    assert DecodeOptions(model="m").worker_name.startswith("decode-")
    assert PrefillOptions(model="m", worker_id="p1").worker_name == "p1"


def test_an_object_is_text_on_a_command_line_and_an_object_in_a_file(tmp_path: Path) -> None:
    scaling = '{"rope_type": "yarn", "factor": 4}'
    path = tmp_path / "options.yaml"
    path.write_text("rope_scaling:\n  rope_type: yarn\n  factor: 4\n")
    by_flag = load_options(DecodeOptions, {"model": "m", "rope_scaling": scaling})
    by_file = load_options(DecodeOptions, {"model": "m"}, path)
    assert by_flag.rope_scaling == by_file.rope_scaling
    assert f"--rope-scaling={by_file.rope_scaling}" in to_arguments(by_file)
    for wrong in ("[1]", "{", "3"):
        with pytest.raises(ConfigError, match=r"--hf-overrides.*JSON object"):
            load_options(DecodeOptions, {"model": "m", "hf_overrides": wrong})
    with pytest.raises(ConfigError, match="--rope-scaling: the oracle engine"):
        load_options(DecodeOptions, {"model": "m", "engine": "oracle", "rope_scaling": scaling})
