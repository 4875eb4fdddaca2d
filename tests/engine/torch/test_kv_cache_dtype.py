"""An engine with KV in 8 bits: tokens do not depend on what happens to the blocks, and the text is
nearly as likely."""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from baton.errors import ConfigError, EngineFault
from baton.types import Sampling
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.kv.range import KvRange
from engine.kv.tiers.runner import InlineRunner
from engine.torch.engine import TorchEngine
from kv_transfer.codec import ChunkCodec
from kv_transfer.wire_format import agreed_dtype, wire_format
from tests.support.drive_engine import generate, token_ids
from tests.support.engines import load_engine
from worker_core.swap import SwapSpace

MakeEngine = Callable[..., TorchEngine]
BOX_MODEL = Path(__file__).parents[3] / "models" / "baton-py-6m"
SCALED = ["int8", "fp8"]
PROMPT = tuple(torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(3)).tolist())
#: Nats per token that the type may cost on Python text.
BOUNDS = {"float16": 0.001, "bfloat16": 0.002, "int8": 0.003, "fp8": 0.01}


def after(engine: TorchEngine, tokens: tuple[int, ...], table: tuple[int, ...]) -> list[int]:
    """The next 12 tokens, all but the last of `tokens` being in the blocks of `table`."""
    output: list[int] = []
    while len(output) < 12:
        known = (*tokens, *output)
        asked = SampleRow(0, Sampling(), known, len(tokens))
        part = SequenceSlice(known[-1:], len(known) - 1, table, (asked,))
        output.append(engine.forward(Batch((part,)))[0][0].token_id)
    return output


@pytest.mark.parametrize("kv_cache_dtype", SCALED)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_chunks_and_stale_blocks_change_nothing(
    tiny_model: Callable[..., Path], dtype: str, kv_cache_dtype: str
) -> None:
    engine = load_engine(
        str(tiny_model("mistral", sliding_window=20)),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=8,
        num_blocks=64,
    )
    assert engine.spec.layout.dtype == kv_cache_dtype
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:22]]
    whole = token_ids(generate(engine, prompts, Sampling(), 8))
    engine.kv.tensor.view(torch.uint8).fill_(127)
    assert engine.kv.scales is not None
    engine.kv.scales.fill_(torch.nan)
    for chunk in (1, 18):
        assert token_ids(generate(engine, prompts, Sampling(), 8, chunk_tokens=chunk)) == whole


@pytest.mark.parametrize("kv_cache_dtype", SCALED)
def test_a_broken_sequence_fails_alone(tiny_engine: MakeEngine, kv_cache_dtype: str) -> None:
    engine = tiny_engine(block_size=8, kv_cache_dtype=kv_cache_dtype)
    slices = []
    for i in range(2):
        tokens = PROMPT[i : i + 10]
        table = (2 * i, 2 * i + 1)
        engine.forward(Batch((SequenceSlice(tokens[:9], 0, table),)))
        slices.append(
            SequenceSlice(tokens[9:], 9, table, (SampleRow(0, Sampling(), tokens, len(tokens)),))
        )
    healthy = engine.forward(Batch((slices[0],)))
    assert engine.kv.scales is not None
    engine.kv.scales[2, 1, 1, 0, 3] = torch.nan
    with pytest.raises(EngineFault) as caught:
        engine.forward(Batch(tuple(slices)))
    assert caught.value.metadata["slices"] == "1"
    assert engine.forward(Batch((slices[0],))) == healthy


@pytest.mark.parametrize("kv_cache_dtype", SCALED)
@pytest.mark.parametrize("block_size", [8, 4])
def test_two_engines_give_the_tokens_of_one(
    tiny_engine: MakeEngine, kv_cache_dtype: str, block_size: int
) -> None:
    prefill = tiny_engine(block_size=8, kv_cache_dtype=kv_cache_dtype)
    decode = tiny_engine(block_size=block_size, kv_cache_dtype=kv_cache_dtype)
    held = PROMPT[:-1]
    sent, received = (9, 2, 5, 4, 0, 7, 1), tuple(range(40, 20, -1))
    prefill.forward(Batch((SequenceSlice(held, 0, sent),)))
    ours, theirs = prefill.spec.layout, decode.spec.layout
    assert ours.difference(theirs) is None
    wire = wire_format(agreed_dtype(ours.dtype, theirs.dtype, "auto"), ours)
    piece = KvRange(0, len(held), 0, ours.num_layers)
    payload = memoryview(bytearray(wire.num_bytes(piece)))
    ChunkCodec(prefill.kv, wire).pack(sent, piece, payload)
    ChunkCodec(decode.kv, wire).unpack(received, piece, payload)
    assert after(decode, PROMPT, received) == after(prefill, PROMPT, sent)


@pytest.mark.parametrize("kv_cache_dtype", SCALED)
def test_swapped_and_copied_blocks_go_on_alike(
    tiny_engine: MakeEngine, kv_cache_dtype: str
) -> None:
    engine = tiny_engine(block_size=8, kv_cache_dtype=kv_cache_dtype)
    held, table = PROMPT[:-1], (9, 2, 5, 4, 0, 7, 1)
    engine.forward(Batch((SequenceSlice(held, 0, table),)))
    swap = SwapSpace(engine.kv, 1 << 20, InlineRunner(), lambda _: None, lambda: 0.0)
    swap.copy_out("k", table, len(held))
    assert swap.num_bytes == len(held) * engine.spec.layout.token_bytes
    engine.kv.copy_blocks(table[:5], (20, 21, 22, 23, 24))
    expected = after(engine, PROMPT, table)
    assert after(engine, PROMPT, (20, 21, 22, 23, 24, 25, 26)) == expected
    swap.copy_in("k", (30, 31, 32, 33, 34, 35, 36), 0)
    assert after(engine, PROMPT, (30, 31, 32, 33, 34, 35, 36)) == expected


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_eight_bits_hold_nearly_twice_the_tokens(tiny_engine: MakeEngine, head_dim: int) -> None:
    layouts = [
        tiny_engine(kv_cache_dtype=dtype, head_dim=head_dim).spec.layout
        for dtype in ("bfloat16", "int8", "fp8")
    ]
    half, *eights = [layout.block_bytes for layout in layouts]
    assert eights == [half * (head_dim + 4) // (2 * head_dim)] * 2


@pytest.mark.parametrize(
    ("kv_cache_dtype", "block_size", "told"),
    [("int4", 16, "use auto, float32"), ("int8", 3, "a block has 30 elements")],
)
def test_what_cannot_be_kept_is_refused(
    tiny_model: Callable[..., Path], kv_cache_dtype: str, block_size: int, told: str
) -> None:
    model = str(tiny_model(head_dim=10))
    with pytest.raises(ConfigError, match=told):
        load_engine(model, kv_cache_dtype=kv_cache_dtype, block_size=block_size, num_blocks=1)


@pytest.mark.slow
def test_the_box_model_keeps_its_likelihood() -> None:
    ids = (
        Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json")).encode(inspect.getsource(heapq)).ids
    )

    def loss(kv_cache_dtype: str) -> float:
        """Nats per token."""
        engine = load_engine(
            str(BOX_MODEL), dtype="float32", kv_cache_dtype=kv_cache_dtype, num_blocks=40
        )
        tokens = tuple(ids[:600])
        rows = tuple(SampleRow(i, Sampling(), tokens, 600) for i in range(599))
        logits = engine.logits(Batch((SequenceSlice(tokens, 0, range(40), rows),)))
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])))

    original = loss("auto")
    assert original < 4
    losses = {dtype: loss(dtype) for dtype in BOUNDS}
    assert all(abs(losses[dtype] - original) < bound for dtype, bound in BOUNDS.items()), losses
