"""Times by the roofline: a step or prompt takes at least as long as reading its bytes, or computing
its products, whichever is longer (Williams, Waterman, Patterson, 2009).

    bytes  = weights read + KV read                     by a rank: its share of both
    flops  = 2 * weights * tokens + pair flops * (query, key) pairs
    stage  = max(bytes / bandwidth, flops / peak) + exchanges of its layers + the host's time
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.degrees import layer_exchange, stage_exchange
from engine.plan.devices import Device
from engine.plan.model import ModelSizes, Weights
from engine.ranks.mesh import Degrees, stage_layers


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward: num_seqs sequences with num_new new tokens each, after num_cached tokens."""

    num_seqs: int
    num_new: int
    num_cached: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new


@dataclass(frozen=True, slots=True)
class Cost:
    """A rank's work in a forward. flops: of products of plain weights; pairs_flops: of attention;
    host_s: see HostCosts."""

    forward: Forward
    read_bytes: float
    flops: float
    pairs_flops: float
    quantized_flops: float
    exchange_s: float
    host_s: float

    def seconds(self, device: Device, dtype: str, product_dtype: str) -> float:
        num_rows = self.forward.num_tokens
        compute_s = self.flops / device.peak(dtype, num_rows)
        if self.quantized_flops:
            compute_s += self.quantized_flops / device.peak(product_dtype, num_rows)
        attention = device.attention_peak(dtype, num_rows, self.forward.num_new)
        compute_s += self.pairs_flops / attention
        read_s = self.read_bytes / device.read_bytes_per_s
        busy = read_s + compute_s if device.adds_up else max(read_s, compute_s)
        return busy + self.exchange_s + self.host_s


def num_pairs(num_cached: int, num_new: int, window: int | None) -> int:
    """(query, key) pairs of num_new tokens after num_cached: each sees itself and those before it,
    at most `window` in all."""
    first, last = num_cached + 1, num_cached + num_new
    if window is None or last <= window:
        return (first + last) * num_new // 2
    if first >= window:
        return window * num_new
    growing = window - first
    return (first + window - 1) * growing // 2 + window * (num_new - growing)


def stage_costs(
    model: ModelSizes, degrees: Degrees, device: Device, forward: Forward
) -> tuple[Cost, ...]:
    """Cost of a rank of each stage."""
    stages = stage_layers(len(model.layers), degrees.pipeline)
    return tuple(_stage_cost(model, degrees, device, forward, stage) for stage in stages)


def _stage_cost(
    model: ModelSizes, degrees: Degrees, device: Device, forward: Forward, stage: range
) -> Cost:
    storage, size = model.storage, degrees.tensor
    tokens = forward.num_tokens
    read, used, pairs_flops, kv, exchange_s = 0.0, Weights(), 0.0, 0.0, 0.0
    # Latent rows, and KV heads of which there are fewer than ranks, are whole on every rank.
    token_bytes = model.layout.token_layer_bytes / min(size, model.layout.num_kv_heads)
    share = model.expected_experts(tokens)
    for index in stage:
        layer = model.layers[index]
        always = layer.attention + layer.mlp + layer.other
        read += storage.read_bytes(always) + share * storage.read_bytes(layer.experts)
        used += always
        if layer.experts.total:
            used += _chosen(model, layer.experts)
        if layer.has_state:
            kv += forward.num_seqs * model.layout.state_layer_bytes
        else:
            pairs = num_pairs(forward.num_cached, forward.num_new, layer.window)
            pairs_flops += forward.num_seqs * pairs * layer.pair_flops
            seen = forward.num_cached + forward.num_new
            if layer.window is not None:
                seen = min(seen, layer.window - 1 + forward.num_new)
            kv += forward.num_seqs * seen * token_bytes
        experts = bool(layer.experts.total)
        ranks = layer_exchange(model, degrees, device, has_experts=experts)
        exchange_s += ranks.seconds(tokens, device)
    flops = 2.0 * tokens * used.plain
    quantized = 2.0 * tokens * used.quantized
    if stage.start == 0:
        read += storage.read_bytes(model.head)
        flops += 2.0 * forward.num_seqs * model.head.plain
        quantized += 2.0 * forward.num_seqs * model.head.quantized
    sent = forward.num_seqs if stage.stop == len(model.layers) else tokens
    exchange_s += stage_exchange(model, degrees, device).seconds(sent, device)
    host = device.host(size)
    host_s = host.step_s + (forward.num_seqs - 1) * host.sequence_s + len(stage) * host.layer_s
    return Cost(
        *(forward, read / size + kv, flops / size, pairs_flops / size, quantized / size),
        *(exchange_s, host_s),
    )


def _chosen(model: ModelSizes, experts: Weights) -> Weights:
    num, chosen = model.num_experts, model.num_chosen
    return Weights(experts.plain * chosen // num, experts.quantized * chosen // num)


def _seconds(model: ModelSizes, degrees: Degrees, device: Device, forward: Forward) -> list[float]:
    dtype, product = model.storage.dtype, model.storage.product_dtype
    costs = stage_costs(model, degrees, device, forward)
    return [cost.seconds(device, dtype, product) for cost in costs]


def step_s(model: ModelSizes, degrees: Degrees, device: Device, batch: int, context: int) -> float:
    """Seconds between two tokens of each of `batch` sequences of `context` tokens.

    Stages work on parts of the batch in turn, so a token passes all stages, each with its part.
    """
    part = -(-batch // degrees.pipeline)
    return sum(_seconds(model, degrees, device, Forward(part, 1, context - 1)))


def prompt_s(
    model: ModelSizes, degrees: Degrees, device: Device, num_tokens: int, chunk: int
) -> float:
    """Seconds from a prompt to its first token, alone on the worker, in chunks that follow each
    other through the stages: the slowest stage for each chunk, and the others for the last."""
    total, times = 0.0, [0.0]
    for start in range(0, num_tokens, chunk):
        new = min(chunk, num_tokens - start)
        times = _seconds(model, degrees, device, Forward(1, new, start))
        total += max(times)
    return total + sum(times) - max(times)
