"""Times by the roofline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plan.degrees import layer_exchange, stage_exchange
from engine.plan.devices import HostCosts
from engine.plan.roofline import Forward, num_pairs, prompt_s, stage_costs, step_s
from engine.ranks.mesh import Degrees
from tests.support.planned import CONFIGS, LLAMA_8B, NAMES, device_of, sizes_of

ALONE = Degrees()


@given(st.integers(0, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_pairs_are_counted(num_cached: int, num_new: int, window: int | None) -> None:
    seen = range(num_cached + 1, num_cached + num_new + 1)
    assert num_pairs(num_cached, num_new, window) == sum(min(n, window or n) for n in seen)


@pytest.mark.parametrize(("batch", "expected_ms"), [(1, 3.52), (64, 5.49), (256, 11.5)])
def test_steps_of_llama_8b_on_a_measured_h200(batch: int, expected_ms: float) -> None:
    """The floors that were computed by hand for its rates, at 1,024 tokens each."""
    found = step_s(sizes_of(LLAMA_8B), ALONE, device_of(), batch, 1024)
    assert found * 1e3 == pytest.approx(expected_ms, rel=0.01)


def test_a_prompt_of_llama_8b_on_a_measured_h200() -> None:
    found = prompt_s(sizes_of(LLAMA_8B), ALONE, device_of(), 8192, 2048)
    assert found * 1e3 == pytest.approx(167, rel=0.01)


@given(NAMES, st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(1, 3000))
def test_more_work_never_takes_less(name: str, tensor: int, pipeline: int, context: int) -> None:
    sizes, degrees, device = sizes_of(CONFIGS[name]), Degrees(tensor, pipeline), device_of()
    batches = [step_s(sizes, degrees, device, batch, context) for batch in (1, 2, 8, 64)]
    contexts = [step_s(sizes, degrees, device, 8, context + more) for more in (0, 1, 500)]
    prompts = [prompt_s(sizes, degrees, device, context + more, 512) for more in (0, 1, 500)]
    for times in (batches, contexts, prompts):
        assert all(later >= earlier for earlier, later in pairwise(times))


@given(NAMES, st.integers(1, 64), st.integers(0, 3000))
def test_a_forward_takes_as_long_as_its_bytes_and_its_products(
    name: str, num_new: int, num_cached: int
) -> None:
    sizes, forward = sizes_of(CONFIGS[name]), Forward(2, num_new, num_cached)
    device = device_of()
    (cost,) = stage_costs(sizes, ALONE, device, forward)
    alone, added = (
        cost.seconds(each, "bfloat16", "bfloat16")
        for each in (device, replace(device, adds_up=True))
    )
    flops = cost.flops + cost.quantized_flops + cost.pairs_flops
    read_s, compute_s = cost.read_bytes / 4.3e12, flops / 790e12
    assert alone == pytest.approx(max(read_s, compute_s))
    assert added == pytest.approx(read_s + compute_s)
    assert cost.exchange_s == 0


@given(NAMES, st.integers(1, 64), st.integers(1, 3000))
def test_ranks_and_stages_share_the_work(name: str, batch: int, context: int) -> None:
    sizes, forward = sizes_of(CONFIGS[name]), Forward(batch, 1, context)
    device = device_of()
    (whole,) = stage_costs(sizes, ALONE, device, forward)
    for degrees in (Degrees(2), Degrees(4), Degrees(1, 2), Degrees(2, 3)):
        costs = stage_costs(sizes, degrees, device, forward)
        assert degrees.tensor * sum(c.flops for c in costs) == pytest.approx(whole.flops)
        assert degrees.tensor * sum(c.read_bytes for c in costs) >= whole.read_bytes * (1 - 1e-9)
        assert all(cost.exchange_s > 0 for cost in costs)


def test_stages_shorten_long_prompts_and_not_steps() -> None:
    sizes, device = sizes_of(LLAMA_8B), device_of()
    alone, staged = (prompt_s(sizes, d, device, 1 << 15, 2048) for d in (ALONE, Degrees(1, 4)))
    assert alone / 4 < staged < alone / 3
    steps = [step_s(sizes, d, device, 1, 1024) for d in (ALONE, Degrees(1, 4), Degrees(4))]
    assert steps[1] > steps[0] > steps[2]


def test_all_reduces_move_the_hidden_state() -> None:
    sizes, device = sizes_of(LLAMA_8B), device_of()
    exchange = layer_exchange(sizes, Degrees(4), device, has_experts=False)
    assert (exchange.num, exchange.bytes_per_token) == (2, 2 * 2 * 3 / 4 * 4096 * 2)
    on_cpu = layer_exchange(sizes, Degrees(4), replace(device, kind="cpu"), has_experts=False)
    assert on_cpu.num == 4
    assert on_cpu.bytes_per_token == 3 / 4 * (4096 + 2 * 4096 + 14_336) * 2
    assert layer_exchange(sizes, ALONE, device, has_experts=False).seconds(64, device) == 0


def read_bytes(name: str, degrees: Degrees, num_cached: int) -> float:
    forward = Forward(1, 1, num_cached)
    return stage_costs(sizes_of(CONFIGS[name]), degrees, device_of(), forward)[0].read_bytes


def test_windowed_layers_read_their_window() -> None:
    layout = sizes_of(CONFIGS["mistral"]).layout
    window = 32
    full = read_bytes("mistral", ALONE, window - 1)
    assert full - read_bytes("mistral", ALONE, window - 2) == layout.token_bytes
    assert read_bytes("mistral", ALONE, 10 * window) == full


def test_ranks_read_their_kv_heads_and_whole_latent_rows() -> None:
    for name, share in (("llama", 1 / 2), ("deepseek_v3", 1.0)):
        more = read_bytes(name, Degrees(2), 1100) - read_bytes(name, Degrees(2), 100)
        assert more == pytest.approx(1000 * share * sizes_of(CONFIGS[name]).layout.token_bytes)


def test_a_token_is_computed_by_the_experts_that_it_chooses() -> None:
    sizes = sizes_of(CONFIGS["qwen3_moe"])
    (cost,) = stage_costs(sizes, ALONE, device_of(), Forward(1, 1, 0))
    attention = sum(layer.attention.total + layer.other.total for layer in sizes.layers)
    chosen = sum(layer.experts.total for layer in sizes.layers) * 2 // 8
    pairs = sum(layer.pair_flops for layer in sizes.layers)
    assert cost.flops == 2 * (attention + chosen + sizes.head.total)
    assert cost.pairs_flops == pairs


@given(NAMES, st.integers(1, 64), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_the_host_takes_its_time_beside(name: str, batch: int, tensor: int, pipeline: int) -> None:
    """In each stage; ranks that were not measured take as long as most of those that were."""
    sizes, degrees = sizes_of(CONFIGS[name]), Degrees(tensor, pipeline)
    costs = {1: HostCosts(3.0, 0.5, 0.25), 2: HostCosts(4.0, 0.75, 0.25, 1.0)}
    plain = device_of()
    added = step_s(sizes, degrees, replace(plain, hosts=costs), batch, 100) - step_s(
        sizes, degrees, plain, batch, 100
    )
    host, part, num_layers = costs[tensor], -(-batch // pipeline), len(sizes.layers)
    waits = num_layers * 2 if tensor > 1 else 0
    wanted = pipeline * (host.step_s + (part - 1) * host.sequence_s) + num_layers * host.layer_s
    assert added == pytest.approx(wanted + waits * (host.exchange_s - plain.link_latency_s))
    assert replace(plain, hosts=costs).host(8) == costs[2]


def test_attention_has_rates_of_its_own() -> None:
    """One for steps, one for prompts."""
    sizes, device = sizes_of(CONFIGS["llama"]), replace(device_of(), adds_up=True)
    own = replace(device, attention_flops_per_s=(1e9, 1e10))
    pairs_flops = sum(layer.pair_flops for layer in sizes.layers)
    step, own_step = (step_s(sizes, ALONE, each, 2, 100) for each in (device, own))
    assert own_step - step == pytest.approx(200 * pairs_flops * (1 / 1e9 - 1 / 790e12))
    prompt, own_prompt = (prompt_s(sizes, ALONE, each, 100, 512) for each in (device, own))
    assert own_prompt - prompt == pytest.approx(5050 * pairs_flops * (1 / 1e10 - 1 / 790e12))


def test_stages_wait_for_their_link_alone() -> None:
    sizes, device = sizes_of(LLAMA_8B), replace(device_of(), hosts={1: HostCosts(exchange_s=9.0)})
    assert stage_exchange(sizes, Degrees(1, 2), device).wait_s == device.link_latency_s
