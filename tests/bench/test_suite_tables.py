"""The generated parts of docs/performance.md: what they say follows the figures, losses as well as
gains."""

from __future__ import annotations

from typing import Any

import pytest

from bench.suite.engine_tables import engine_table, levels_table, peers_table
from bench.suite.host_tables import ahead_table, gateway_table, scheduler_table
from bench.suite.markdown import Goal, about, goal_line, number, table
from bench.suite.split_tables import split_table

ABOUT: dict[str, Any] = {
    "command": ["python", "-m", "bench.some", "--json", "some.json"],
    "started": "2026-11-21T21:00:00+00:00",
    "git": {"commit": "0123456789abcdef"},
    "machine": {"cpu": "Some CPU", "num_cores": 2, "load_average": [3.5, 1, 1]},
    "load_average_before": [0.25, 0, 0],
    "versions": {"python": "3.11.7", "torch": "2.13.0", "baton": "0"},
}


def figure(contender: str, step_ms: float, **more: Any) -> dict[str, Any]:
    about = {"model": "1.1b", "dtype": "bfloat16", "batch": 1, "context": 512, "prompt_ms": 100.0}
    own = {"contender": contender, "step_ms": step_ms, "chunk": 0, "agreement": None}
    return {**own, **about, **more}


def peers(*figures: dict[str, Any], missing: tuple[dict[str, Any], ...] = ()) -> str:
    return peers_table({**ABOUT, "num_threads": 2, "figures": figures, "missing": missing})


def test_it_says_where_when_how_and_how_busy_the_machine_was() -> None:
    told = about(ABOUT)
    assert "2026-11-21 21:00:00 UTC" in told
    assert "Some CPU, 2 cores" in told
    assert "load average 0.2 before and 3.5 after" in told
    assert "python 3.11.7, torch 2.13.0" in told
    assert "commit 0123456789" in told
    assert "`python -m bench.some --json some.json`" in told


def test_a_table_has_as_many_cells_in_each_line() -> None:
    lines = table(["a", "b"], [["1", "2"], ["3", "4"]]).splitlines()
    assert {line.count("|") for line in lines} == {3}
    assert len(lines) == 4


def test_a_goal_is_met_at_its_bound_and_missed_beyond() -> None:
    least, most = Goal("least", 2.0), Goal("most", 2.0, is_at_most=True)
    assert goal_line(least, {"a": 2.0, "b": 1.99}, " x") == (
        "* least: a 2.00 x (met), b 1.99 x (**missed**)."
    )
    assert goal_line(most, {"a": 2.0, "b": 2.01}).count("**missed**") == 1
    assert goal_line(least, {}) == "* least: not measured."


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0.00"), (0.0004, "0.0004"), (0.25, "0.25"), (12.34, "12.3"), (123456.7, "123,457")],
)
def test_numbers_have_the_digits_that_count(value: float, told: str) -> None:
    assert number(value) == told


def engine_document(step_ms: float, int8_ms: float, floor_ms: float) -> dict[str, Any]:
    floor = {"step_ms": floor_ms, "prompt_ms": 80.0}
    return {
        **ABOUT,
        "num_threads": 2,
        "figures": [figure("baton", step_ms), figure("baton", int8_ms, dtype="int8")],
        "floors": [floor, {**floor, "prompt_ms": None}],
        "roofs": [
            {
                "model": "1.1b",
                "dtype": "bfloat16",
                "read_bytes_per_s": 5e10,
                "flops_per_s": 4e11,
            }
        ],
    }


def test_the_engine_is_told_as_a_share_of_the_roof() -> None:
    told = engine_table(engine_document(10.0, 6.0, 9.0))
    assert "| 1.1b | bfloat16 | 1 | 512 | 10.0 | 0.90 | 100 | 0.80 |" in told
    assert "50.0 GB/s and 400 GFLOP/s (1.1b bfloat16)" in told
    assert "1.1b 0.90 (met)" in told
    assert "1.1b 0.80 (met)" in told
    assert "1.1b 1.67 times (met)" in told
    slow = engine_table(engine_document(12.0, 11.0, 9.0))
    assert "1.1b 0.75 (**missed**)" in slow
    assert "1.1b 1.09 times (**missed**)" in slow


def test_a_model_that_fits_the_cache_says_nothing_about_the_read_roof() -> None:
    document = engine_document(10.0, 6.0, 9.0)
    for one in document["figures"]:
        one["model"] = "box"
    told = engine_table(document)
    assert "0.85 of the read roof or more: not measured" in told
    assert "box 0.80 (met)" in told


def test_losses_to_a_peer_are_told_as_plainly_as_gains() -> None:
    ours = figure("baton", 10.0, agreement=1.0)
    told = peers(ours, figure("llama.cpp", 8.0, prompt_ms=200.0))
    assert (
        "**Where Baton's engine loses**: 1.1b bfloat16, 1 x 512, a step by llama.cpp (1.25 times"
        in told
    )
    assert "a prompt by" not in told
    assert "| llama.cpp | 8.00 | 1.25 | 200 | 0.50 | - |" in told
    assert "No peer is faster" in peers(ours, figure("llama.cpp", 12.0))


def test_the_fastest_peer_counts() -> None:
    told = peers(
        figure("baton", 10.0, batch=8),
        figure("vllm", 12.0, batch=8, chunk=512),
        figure("openvino", 14.0, batch=8),
        figure("baton", 10.0),
        figure("vllm", 11.5, chunk=2048),
    )
    assert "1.3 times as fast: 1.1b 1.20 times (**missed**)" in told
    assert "1.1 times as fast as the best peer's: 1.1b 1.15 times (met)" in told
    assert "| vllm, chunks of 2,048 |" in told


def test_noise_is_the_engine_beside_itself_and_no_loss() -> None:
    told = peers(figure("baton", 10.0), figure("baton again", 9.5))
    assert "differs by up to 5% in steps and 0% in prompts" in told
    assert "No peer is faster" in told


def test_a_peer_that_could_not_run_says_why() -> None:
    reason = {
        "model": "box",
        "dtype": "int8",
        "contender": "llama.cpp",
        "reason": "it is not built",
    }
    told = peers(figure("baton", 10.0), missing=(reason,))
    assert "| llama.cpp | none |" in told
    assert "llama.cpp on box in int8 has no figures: it is not built." in told


def test_other_tokens_in_float32_are_told() -> None:
    same = figure("baton", 10.0, dtype="float32", agreement=1.0)
    other = figure("llama.cpp", 12.0, dtype="float32", agreement=0.5)
    assert "all write the same tokens" in peers(same)
    assert "**not so**: llama.cpp on 1.1b 50%" in peers(same, other)


def test_the_scheduler_is_flat_or_not() -> None:
    keys = ("step_us", "plan_us", "open_us", "abort_us", "take_us", "find_us", "expire_us")
    few = {"num_seqs": 16, **dict.fromkeys(keys, 2.0)}
    many = {"num_seqs": 4096, **dict.fromkeys(keys, 3.0), "step_us": 2.2}
    told = scheduler_table({**ABOUT, "tier": [few, many]})
    assert "step 1.10 (met), scheduler's part 1.50 (**missed**)" in told
    assert "| 4096 | 2.20 | 3.00 |" in told


def test_a_step_is_the_engines_own_or_longer() -> None:
    hidden = {"num_seqs": 64, "engine_ms": 6.0, "waiting_ms": 7.0, "ahead_ms": 6.1}
    late = {"num_seqs": 512, "engine_ms": 6.0, "waiting_ms": 14.0, "ahead_ms": 8.0}
    shares = ({**hidden, "hidden_share": 0.9}, {**late, "hidden_share": 0.75})
    told = ahead_table({**ABOUT, "steps": list(shares)})
    assert "64 1.02 (met), 512 1.33 (**missed**)" in told
    assert "| 512 | 6.00 | 14.0 | 8.00 | 75% |" in told


def test_the_gateway_has_a_line_for_each_flow_and_for_each_goal() -> None:
    flow = {"num_streams": 64, "num_tokens": 100, "step_tokens": 8, "step_ms": 1.0}
    one = {
        "tokens_per_core_s": 150_000.0,
        "chunk_tokens": 8.0,
        "chunk_cpu_us": 50,
        "bare_cpu_us": 30,
    }
    paced = {**one, "flow": {**flow, "step_ms": 20.0}, "tokens_per_core_s": 9_000.0}
    by_one = {**flow, "step_ms": 20.0, "step_tokens": 1}
    single = {**paced, "flow": by_one, "chunk_tokens": 1.0, "chunk_cpu_us": 60.0}
    flows = [{**one, "flow": flow}, paced, single]
    ttft = {"gateway_ms": 1.5, "source_ms": 0.5, "bare_ms": 0.25, "cpu_ms": 0.9}
    text = gateway_table(
        {
            **ABOUT,
            "gateway": flows,
            "added_ttft_ms": {**ttft, "beside_bare_ms": 1.25},
            "gateway_http": flows,
            "added_ttft_ms_http": {**ttft, "beside_bare_ms": 1.25},
            "idle": {"num_connections": 5000, "bytes_each": 4608, "cpu_before": 0, "cpu": 0.01},
            "slow_readers": {
                "num_streams": 64,
                "cpu_us": 30.0,
                "brisk_cpu_us": 40.0,
                "held_bytes": 200,
            },
            "service": {"num_streams": 64, "share": 0.98},
        }
    )
    assert "| 8 tokens each 20 ms | 25,600 | 8.00 | 50.0 | 30.0 | 9,000 |" in text
    assert "one core: 8 tokens each 1 ms 150,000 (**missed**)." in text
    assert "at most 90 us of CPU for a chunk of one token: 1 token each 20 ms 60.0 (met)" in text
    assert (
        "at most 50 us of CPU for a chunk of one token: 1 token each 20 ms 60.0 (**missed" in text
    )
    assert text.count("times of the bare server's: 1 token each 20 ms 2.00.") == 2
    assert text.count("added 1.25 ms (**missed**)") == 1
    assert "5,000 idle HTTP connections: 4.50 KiB of memory each, and 1.00% of a core" in text
    assert "200 bytes of memory for each token" in text
    assert "64 streams 0.98 (met)" in text


def split_document() -> dict[str, Any]:
    def point(target: str, p99: float) -> dict[str, Any]:
        times = {"p50": 5.0, "p99": p99, "max": 2 * p99}
        summary = {"itl_ms": times, "burst_ttft_ms": times, "attainment": 0.95}
        return {"target": target, "rate": 2.0, "repetition": 0, "summary": summary}

    return {
        **ABOUT,
        "model": "125m",
        "engine": {"step_ms": 0.0, "token_us": 0.0},
        "chunk_tokens": {"colocated": 2048},
        "tuned_tokens": 64,
        "comparison": {
            "rates": [1.0, 2.0],
            "seconds": 10.0,
            "wanted": 0.9,
            "slo": {"ttft_ms": 1500.0, "tpot_ms": 30.0},
            "steady": {"rate": 3.0, "num_input_tokens": 64, "num_output_tokens": 256},
            "long": {"burst_size": 4, "trace": "", "num_input_tokens": 1200},
        },
        "goodput_long_prompts_per_s": {"split": 2.0, "colocated": None},
        "points": [point("split", 6.0), point("colocated", 90.0)],
    }


def test_the_split_is_told_by_its_gaps_and_its_goodput() -> None:
    told = split_table(split_document())
    assert "colocated at 2/s 15.0 times (met)" in told
    assert "split 2, colocated below 1" in told
    assert "Model: 125m." in told
    assert "of about 1200 tokens" in told


def test_the_split_says_what_its_engine_was_and_which_trace() -> None:
    document = split_document()
    document["engine"] = {"step_ms": 5.5, "token_us": 20.0}
    document["comparison"]["long"]["trace"] = "some.csv"
    told = split_table(document)
    assert "a step takes 5.5 ms and 20 us for each new token" in told
    assert "of the lengths of some.csv" in told
    assert "At most it could be 8.4 times colocated's (46.5 ms)" in told


def test_a_rival_that_no_goal_speaks_of_meets_and_misses_none() -> None:
    document = split_document()
    tuned = {**document["points"][1], "target": "colocated-tuned"}
    document["points"].append(tuned)
    document["goodput_long_prompts_per_s"]["colocated-tuned"] = 1.0
    told = split_table(document)
    assert "At most" not in told
    assert "beside small chunks: colocated-tuned at 2/s 15.0 times." in told
    assert told.count("(met)") == 1


def _level(name: str, step_ms: float, llama_step_ms: float) -> dict[str, Any]:
    about = {"model": "125m", "batch": 1, "context": 256}
    figures = [
        figure("baton", step_ms, **about),
        figure("llama.cpp", llama_step_ms, **about),
        figure("transformers", 40.0, **about),
        figure("transformers", 20.0, **about, dtype="float32"),
    ]
    floor = {"step_ms": 8.0, "prompt_ms": 70.0}
    roof = {"model": "125m", "dtype": "bfloat16", "read_bytes_per_s": 3e10, "flops_per_s": 2e11}
    return {
        "level": name,
        "figures": figures,
        "floors": [floor] * 4,
        "roofs": [roof],
        "missing": [],
    }


def test_each_cpu_level_has_a_column_and_is_held_to_the_goals_by_itself() -> None:
    levels = [_level("avx512", 10.0, 10.0), _level("avx2", 16.0, 12.0)]
    told = levels_table({**ABOUT, "num_threads": 2, "levels": levels})
    assert "|  | avx512 | avx2 |" in told
    assert "| 125m bfloat16, 1 x 256: step, ms | 10.0 (0.80; 1.00; 2.00) | 16.0 (" in told
    step = next(line for line in told.splitlines() if "read roof" in line)
    assert "avx512 0.80 (met), avx2 0.50 (**missed**)" in step
    llama = next(line for line in told.splitlines() if "1.0 times as fast as llama.cpp" in line)
    assert "avx512 1.00 times (met), avx2 0.75 times (**missed**)" in llama


def test_a_peer_that_a_level_lacks_is_told_with_its_reason() -> None:
    lacks = {**_level("avx2", 10.0, 10.0)}
    lacks["figures"] = [f for f in lacks["figures"] if f["contender"] == "baton"]
    lacks["floors"] = lacks["floors"][:1]
    lacks["missing"] = [
        {"model": "125m", "dtype": "bfloat16", "contender": "llama.cpp", "reason": "not built"}
    ]
    told = levels_table({**ABOUT, "num_threads": 2, "levels": [lacks]})
    assert "* llama.cpp on 125m in bfloat16 at avx2 has no figures: not built." in told
    assert "llama.cpp's or faster: not measured" in told
