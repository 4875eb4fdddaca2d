"""The decoder that runs its layers in few native calls gives the same bits as the one with a call
for each operation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from baton.types import KvLayout, Sampling
from baton_kernels.cpu.layers import native_layer, row_bytes
from baton_kernels.cpu.library import level
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.groups.group import SlotTable
from engine.kv.groups.window import WINDOWED, WindowSlots, windows_of
from engine.kv.range import KvRange
from engine.kv.tensors.paged import GroupedTensorPool, TorchKvPool, host_pool
from engine.memory_plan import token_bytes
from engine.quantization.config import parse_quantization
from engine.quantization.weight import QuantizedWeight
from engine.ranks.exchange import Alone
from engine.shard import Shard
from engine.torch.decoder import Decoder
from engine.torch.native_decoder import NativeDecoder, make_decoder
from engine.torch.packed import PackedParameters, Packing, pack_parameters
from engine.torch.parameters import empty_parameters
from engine.torch.rope import make_rope
from engine.torch.step import WindowedStep, pack_batch, window_tables
from tests.support.pairwise import pairwise

BLOCK_SIZE, NUM_BLOCKS = 5, 40
CPU = torch.device("cpu")
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 200,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of heads
    "mistral": {"sliding_window": 30},
}


@dataclass(frozen=True)
class Ran:
    states: torch.Tensor
    pool: torch.Tensor
    done: list[int]


def config_of(family: str) -> ModelConfig:
    return parse_config({"model_type": family, **SHAPE, **FAMILIES[family]})


def parameters_of(config: ModelConfig, dtype: torch.dtype, bits: int | None) -> PackedParameters:
    """Random ones; with `bits`, linear layers of integers."""
    generator = torch.Generator().manual_seed(0)
    parameters = empty_parameters(config, dtype, CPU)
    for _, target in parameters.targets():
        target.tensor.normal_(std=0.3, generator=generator)
    if bits is None:
        return pack_parameters(parameters)
    packing = Packing(CPU)
    for spec in (linear.spec for layer in parameters.layers for linear in layer.linears):
        for source in spec.sources:
            size = len(source.rows)
            levels = torch.randint(1 << bits, (size, spec.num_in), generator=generator)
            scales = torch.rand(size, 1, generator=generator) / (1 << bits)
            packing.keep(source.name, QuantizedWeight(levels.to(torch.uint8), scales, None, bits))
    return pack_parameters(parameters, packing)


def batch_of(sampled: str) -> Batch:
    """A prompt, a step after one, and a token with its state wanted three times, or all states."""
    lengths = (40, 1, 1) if sampled == "some" else (1, 1, 1)
    starts = (0, 33, 12)
    rows = {"some": ((39,), (0,), (0, 0, 0)), "more": ((0,), (0,), (0,) * 50)}.get(sampled)
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    slices = []
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        table = [blocks.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))]
        tokens = [(7 * i + j) % SHAPE["vocab_size"] for j in range(length)]
        offsets = rows[i] if rows else (0,)
        asked = tuple(SampleRow(at, Sampling(), tokens, length) for at in offsets)
        slices.append(SequenceSlice(tokens, start, table, asked))
    return Batch(tuple(slices))


def run(
    decoder: Decoder, config: ModelConfig, batch: Batch, tells: bool, stored: str | None = None
) -> Ran:
    name = stored or str(decoder.dtype).removeprefix("torch.")
    layout = KvLayout(
        "m", config.num_layers, config.num_kv_heads, config.head_dim, name, BLOCK_SIZE
    )
    # What lies there are small numbers of any type: bytes below 0x38 make none that is not finite.
    memory = torch.empty(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)
    memory.random_(0, 0x38, generator=torch.Generator().manual_seed(2))
    kv = TorchKvPool(layout, NUM_BLOCKS, CPU, memory)
    rope = make_rope(config, CPU)
    packed = pack_batch(batch, config, rope, kv.tensor, decoder.dtype)
    done: list[int] = []
    with torch.inference_mode():
        states = decoder.forward(packed, kv.tensor, done.append if tells else None, kv.scales)
    return Ran(states, memory, done)


def run_in_two_pools(
    decoder: Decoder, config: ModelConfig, batch: Batch, tells: bool, stored: str
) -> Ran:
    """As `run`, with windowed layers' KV in slots; the pool is all layers' KV of the batch."""
    window, windowed = windows_of(config.windows)
    layout = KvLayout(
        *("m", config.num_layers, config.num_kv_heads, config.head_dim, stored, BLOCK_SIZE),
        window=window,
        windowed_layers=windowed,
    )
    kv = GroupedTensorPool(layout, NUM_BLOCKS, NUM_BLOCKS, host_pool)
    slots = WindowSlots(SlotTable(NUM_BLOCKS, kv.slot_tables[WINDOWED].of_block))
    for block_id in torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)):
        slots.take(int(block_id))
    everything = KvRange(0, NUM_BLOCKS * BLOCK_SIZE, 0, config.num_layers)
    memory = torch.empty(NUM_BLOCKS * layout.block_bytes, dtype=torch.uint8)
    memory.random_(0, 0x38, generator=torch.Generator().manual_seed(2))
    data = memory.numpy().data
    kv.unpack(range(NUM_BLOCKS), everything, data)
    rope = make_rope(config, CPU)
    own = kv.in_slots
    apart = WindowedStep(window_tables(batch, kv), own.tensor, own.scales)
    packed = pack_batch(batch, config, rope, kv.tensor, decoder.dtype, apart=apart)
    assert packed.windowed is not None
    done: list[int] = []
    with torch.inference_mode():
        states = decoder.forward(packed, kv.tensor, done.append if tells else None, kv.scales)
    kv.pack(range(NUM_BLOCKS), everything, data)
    return Ran(states, memory, done)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.few_cases(4)
@pairwise(
    family=list(FAMILIES),
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    sampled=["some", "more", "all"],
)
def test_same_bits(family: str, dtype: torch.dtype, sampled: str) -> None:
    config = config_of(family)
    parameters = parameters_of(config, dtype, None)
    native = make_decoder(config, parameters, dtype, Alone())
    assert isinstance(native, NativeDecoder)
    batch = batch_of(sampled)
    expected = run(Decoder(config, parameters), config, batch, tells=True)
    assert torch.isfinite(expected.states).all()
    for tells in (False, True):
        got = run(native, config, batch, tells)
        assert torch.equal(got.states, expected.states)
        assert torch.equal(got.pool, expected.pool)
        assert got.done == (expected.done if tells else [])


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("stored", ["float32", "float16", "int8", "fp8"])
def test_same_bits_over_a_pool_of_another_type(stored: str) -> None:
    config = config_of("llama")
    parameters = parameters_of(config, torch.bfloat16, None)
    native = make_decoder(config, parameters, DTYPES[stored], Alone())
    assert isinstance(native, NativeDecoder)
    got, expected = (
        run(decoder, config, batch_of("some"), tells=False, stored=stored)
        for decoder in (native, Decoder(config, parameters))
    )
    assert torch.isfinite(expected.states).all()
    assert torch.equal(got.states, expected.states)
    assert torch.equal(got.pool, expected.pool)


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_same_bits_where_windowed_layers_have_a_pool_of_their_own(stored: str) -> None:
    windows = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 30}
    config = parse_config({"model_type": "qwen2", **SHAPE, "num_hidden_layers": 4, **windows})
    assert config.windows == (None, 30, 30, 30)
    # Layers of both kinds by turns, as other families have them.
    config = replace(config, windows=(30, None, 30, None))
    parameters = parameters_of(config, torch.bfloat16, None)
    native = make_decoder(config, parameters, DTYPES.get(stored, torch.bfloat16), Alone())
    assert isinstance(native, NativeDecoder)
    expected = run_in_two_pools(
        *(Decoder(config, parameters), config, batch_of("some")), tells=True, stored=stored
    )
    assert torch.isfinite(expected.states).all()
    for tells in (False, True):
        got = run_in_two_pools(native, config, batch_of("some"), tells=tells, stored=stored)
        assert torch.equal(got.states, expected.states)
        assert torch.equal(got.pool, expected.pool)
        assert got.done == (expected.done if tells else [])


@pytest.mark.usefixtures("each_level")
@pytest.mark.parametrize("bits", [4, 8])
def test_same_bits_with_weights_of_integers(bits: int) -> None:
    config = config_of("llama")
    parameters = parameters_of(config, torch.bfloat16, bits)
    native = make_decoder(config, parameters, torch.bfloat16, Alone())
    assert isinstance(native, NativeDecoder)
    got, expected = (
        run(decoder, config, batch_of("some"), tells=False)
        for decoder in (native, Decoder(config, parameters))
    )
    assert torch.isfinite(expected.states).all()
    assert torch.equal(got.states, expected.states)
    assert torch.equal(got.pool, expected.pool)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("num_heads", [2, 6, 24])
def test_what_a_step_takes_is_in_the_memory_plan(num_heads: int, bits: int | None) -> None:
    config = replace(config_of("llama"), num_heads=num_heads, num_kv_heads=num_heads)
    if bits is not None:
        quantization = parse_quantization({"quant_method": "gptq", "bits": bits, "group_size": 8})
        config = replace(config, quantization=quantization)
    layers = [native_layer(layer) for layer in parameters_of(config, torch.bfloat16, bits).layers]
    states = config.hidden_size + num_heads * config.head_dim
    needed = [row_bytes(layer, 2) for layer in layers if layer is not None]
    assert len(needed) == config.num_layers
    scratch = max(size["scratch"] for size in needed)
    taken = 2 * states + max(sum(size.values()) for size in needed)
    is_widened = bits is None and not level().endswith("_bf16")
    assert (scratch > 0) == (bits is not None or is_widened)
    assert taken <= token_bytes(config, 2)


class OneOfTwo(Alone):
    """A rank that has another beside it."""

    shard = Shard(0, 2)


def test_where_ranks_must_meet_within_a_layer_each_operation_is_called() -> None:
    config = config_of("llama")
    parameters = parameters_of(config, torch.bfloat16, None)
    decoder = make_decoder(config, parameters, torch.bfloat16, OneOfTwo())
    assert not isinstance(decoder, NativeDecoder)
